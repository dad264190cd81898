#include "text/tool_calls_json.h"

#include <utility>

#include "text/markers.h"

namespace moesaic::text {
namespace {

constexpr std::string_view kSpace = " \t\r\n";
constexpr std::string_view kPythonTag = "<|python_tag|>";

std::string Trimmed(std::string_view text) {
  const size_t first = text.find_first_not_of(kSpace);
  if (first == std::string_view::npos) return "";
  return std::string(text.substr(first, text.find_last_not_of(kSpace) - first + 1));
}

void DropSpace(std::string* text) { text->erase(0, std::min(text->find_first_not_of(kSpace), text->size())); }

struct Header {
  std::string name, id;
};

// "function<|tool sep|>NAME", "NAME", or "functions.NAME:INDEX", which is the call's id as well.
Header ParseHeader(std::string_view text) {
  constexpr std::string_view kSeparator = "<｜tool▁sep｜>";
  if (const size_t at = text.find(kSeparator); at != std::string_view::npos) {
    text = text.substr(at + kSeparator.size());
  }
  Header header{.name = Trimmed(text), .id = {}};
  const size_t colon = header.name.rfind(':');
  constexpr std::string_view kFunctions = "functions.";
  if (colon == std::string::npos ||
      header.name.find_first_not_of("0123456789", colon + 1) != std::string::npos) {
    return header;
  }
  header.id = header.name;
  header.name.erase(colon);
  if (header.name.starts_with(kFunctions)) header.name.erase(0, kFunctions.size());
  return header;
}

}  // namespace

JsonCallParser::JsonCallParser(const JsonCallFormat& format)
    : format_(format), state_(format.starts_bare ? State::kStart : State::kText) {}

void JsonCallParser::Push(std::string_view piece, ToolDelta* delta) {
  held_.append(piece);
  while (Step(delta)) {
  }
}

bool JsonCallParser::Step(ToolDelta* delta) {
  switch (state_) {
    case State::kStart:
      return StepStart();
    case State::kText:
      return StepText(delta);
    case State::kSection:
      return StepSection();
    case State::kHeader:
      return StepHeader(delta);
    case State::kArguments:
      return StepArguments(delta);
    case State::kObject:
      return StepObject(delta);
    case State::kClose:
      return StepClose();
  }
  return false;
}

void JsonCallParser::Finish(ToolDelta* delta) {
  switch (state_) {
    case State::kText:
    case State::kStart:
      // What only separates calls is no content.
      if (!called_ || held_.find_first_not_of(kSpace) != std::string::npos) delta->content += held_;
      break;
    case State::kHeader:
    case State::kObject:
    case State::kArguments:
      if (!named_) delta->content += raw_ + held_;
      break;
    case State::kSection:
    case State::kClose:
      break;
  }
  held_.clear();
  raw_.clear();
}

void JsonCallParser::Emit(ToolDelta* delta, std::string name, std::string id, std::string arguments) {
  if (!name.empty()) {
    named_ = true;
    ++calls_;
  } else if (arguments.empty()) {
    return;
  }
  argued_ = argued_ || !arguments.empty();
  delta->calls.push_back({calls_ - 1, std::move(id), std::move(name), std::move(arguments)});
}

// An answer that begins with an object is a call until shown otherwise.
bool JsonCallParser::StepStart() {
  std::string_view text = held_;
  text.remove_prefix(std::min(text.find_first_not_of(kSpace), text.size()));
  if (text.starts_with(kPythonTag)) text.remove_prefix(kPythonTag.size());
  text.remove_prefix(std::min(text.find_first_not_of(called_ ? " \t\r\n;," : kSpace), text.size()));
  if (text.empty() || kPythonTag.starts_with(text)) return false;
  if (text.front() != '{') {
    state_ = State::kText;
    return true;
  }
  raw_ = held_.substr(0, held_.size() - text.size());
  held_.erase(0, raw_.size());
  object_ = {};
  named_ = argued_ = false;
  state_ = State::kObject;
  return true;
}

bool JsonCallParser::StepText(ToolDelta* delta) {
  const FoundMark found = FindMark(held_, {format_.section_open, format_.call_open});
  if (found.mark.empty()) {
    size_t settled = held_.size() - BegunAtEnd(held_, {format_.section_open, format_.call_open});
    const size_t written = settled == 0 ? std::string::npos : held_.find_last_not_of(kSpace, settled - 1);
    settled = written == std::string::npos ? 0 : written + 1;
    delta->content.append(held_, 0, settled);
    held_.erase(0, settled);
    return false;
  }
  const size_t written = found.at == 0 ? std::string::npos : held_.find_last_not_of(kSpace, found.at - 1);
  if (written != std::string::npos) delta->content.append(held_, 0, written + 1);
  held_.erase(0, found.at);
  if (found.mark == format_.section_open) {
    held_.erase(0, found.mark.size());
    state_ = State::kSection;
    return true;
  }
  state_ = State::kSection;
  return true;
}

bool JsonCallParser::StepSection() {
  const FoundMark found = FindMark(held_, {format_.call_open, format_.section_close});
  if (found.mark.empty()) {
    held_.erase(0, held_.size() - BegunAtEnd(held_, {format_.call_open, format_.section_close}));
    return false;
  }
  held_.erase(0, found.at + found.mark.size());
  if (found.mark != format_.call_open) {
    state_ = State::kText;
    called_ = true;
    return true;
  }
  raw_ = found.mark;
  named_ = argued_ = false;
  arguments_ = {};
  object_ = {};
  state_ = format_.arguments_open.empty() ? State::kObject : State::kHeader;
  return true;
}

bool JsonCallParser::StepHeader(ToolDelta* delta) {
  const FoundMark found =
      FindMark(held_, {format_.arguments_open, format_.call_close, format_.section_close});
  if (found.mark.empty()) return false;
  if (found.mark == format_.arguments_open) {
    Header header = ParseHeader(std::string_view(held_).substr(0, found.at));
    if (!header.name.empty()) {
      held_.erase(0, found.at + found.mark.size());
      Emit(delta, std::move(header.name), std::move(header.id), "");
      state_ = State::kArguments;
      return true;
    }
  }
  // No name: not a call.
  delta->content += raw_ + held_.substr(0, found.at);
  held_.erase(0, found.at);
  raw_.clear();
  if (found.mark == format_.arguments_open) {
    delta->content += found.mark;
    held_.erase(0, found.mark.size());
  }
  state_ = State::kClose;
  return true;
}

bool JsonCallParser::StepArguments(ToolDelta* delta) {
  if (arguments_.depth() == 0) DropSpace(&held_);
  if (held_.empty()) return false;
  bool done = arguments_.depth() == 0 && held_.front() != '{';  // none, or no object: up to the closing mark
  size_t taken = 0;
  while (!done && taken < held_.size()) {
    const auto step = arguments_.Take(held_[taken]);
    if (step != JsonValueScan::Step::kBroken) ++taken;
    done = step != JsonValueScan::Step::kInside;
  }
  Emit(delta, "", "", held_.substr(0, taken));
  held_.erase(0, taken);
  if (!done) return false;
  if (!argued_) Emit(delta, "", "", "{}");
  state_ = State::kClose;
  return true;
}

bool JsonCallParser::StepObject(ToolDelta* delta) {
  bool done = false;
  size_t taken = 0;
  if (raw_ == format_.call_open || format_.starts_bare) {
    const size_t first = held_.find_first_not_of(kSpace);
    if (first == std::string::npos) return false;
    if (raw_ == format_.call_open && held_[first] != '{') {  // no object: not a call
      delta->content += std::exchange(raw_, {});
      state_ = State::kText;
      return true;
    }
  }
  while (!done && taken < held_.size()) {
    const auto step = object_.Take(held_[taken]);
    if (step != JsonValueScan::Step::kBroken) ++taken;
    done = step != JsonValueScan::Step::kInside;
  }
  raw_.append(held_, 0, taken);
  held_.erase(0, taken);
  if (object_.named()) {
    std::string name = named_ ? "" : object_.name();
    Emit(delta, std::move(name), "", object_.TakeArguments());
  }
  if (!done) return false;
  if (named_) {
    if (!argued_) Emit(delta, "", "", "{}");
    raw_.clear();
    called_ = true;
    state_ = format_.starts_bare ? State::kStart : State::kClose;
    return true;
  }
  delta->content += std::exchange(raw_, {});
  state_ = State::kText;
  return true;
}

// Behind a call: drops what stands before its closing mark, or before what opens or closes next.
bool JsonCallParser::StepClose() {
  const bool sections = !format_.section_open.empty();
  if (!sections) {  // text may follow a call that was not closed
    DropSpace(&held_);
    if (held_.starts_with(format_.call_close)) {
      held_.erase(0, format_.call_close.size());
    } else if (format_.call_close.starts_with(held_)) {
      return false;
    }
    called_ = true;
    state_ = State::kText;
    return true;
  }
  const FoundMark found = FindMark(held_, {format_.call_close, format_.call_open, format_.section_close});
  if (found.mark.empty()) {
    held_.erase(
        0, held_.size() - BegunAtEnd(held_, {format_.call_close, format_.call_open, format_.section_close}));
    return false;
  }
  held_.erase(0, found.at + (found.mark == format_.call_close ? found.mark.size() : 0));
  called_ = true;
  state_ = State::kSection;
  return true;
}

}  // namespace moesaic::text
