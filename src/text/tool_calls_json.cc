#include "text/tool_calls_json.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "text/markers.h"

namespace moesaic::text {
namespace {

constexpr std::string_view kPythonTag = "<|python_tag|>";

void DropSpace(std::string* text) { text->erase(0, std::min(text->find_first_not_of(kSpace), text->size())); }

struct Header {
  std::string name, id;
};

// Parses "function<|tool sep|>NAME", "NAME", or "functions.NAME:INDEX", which is also the call's id.
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
      return StepSection(delta);
    case State::kHeader:
      return StepHeader(delta);
    case State::kArguments:
      return StepArguments(delta);
    case State::kObject:
      return StepObject(delta);
    case State::kClose:
      return StepClose(delta);
  }
  return false;
}

void JsonCallParser::Finish(ToolDelta* delta) {
  switch (state_) {
    case State::kText:
    case State::kStart:
      // White space between calls is not content.
      if (!called_ || held_.find_first_not_of(kSpace) != std::string::npos) delta->content += held_;
      break;
    case State::kHeader:
    case State::kObject:
    case State::kArguments:
      if (!named_) delta->content += raw_ + held_;
      if (named_) Emit(delta, "", "", std::move(space_));
      break;
    case State::kSection:
      MoveText(&held_, held_.size(), &delta->content);
      break;
    case State::kClose:
      if (!fenced_ && !skips_) MoveText(&held_, held_.size(), &delta->content);
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

// An answer that begins with an object is a call unless proven otherwise.
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
    MoveText(&held_, held_.size() - BegunAtEnd(held_, {format_.section_open, format_.call_open}),
             &delta->content);
    return false;
  }
  const size_t moved = MoveText(&held_, found.at, &delta->content);
  held_.erase(0, found.at - moved + (found.mark == format_.section_open ? found.mark.size() : 0));
  state_ = State::kSection;
  return true;
}

bool JsonCallParser::StepSection(ToolDelta* delta) {
  const std::initializer_list<std::string_view> marks = {format_.call_open, format_.section_close};
  MoveText(&held_, std::min(FindMark(held_, marks).at, held_.size() - BegunAtEnd(held_, marks)),
           &delta->content);
  const FoundMark found = FindMark(held_, marks);
  if (found.mark.empty()) return false;
  held_.erase(0, found.at + found.mark.size());
  if (found.mark != format_.call_open) {
    state_ = State::kText;
    called_ = true;
    return true;
  }
  raw_ = found.mark;
  named_ = argued_ = skips_ = false;
  fenced_ = !format_.arguments_close.empty();
  space_.clear();
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
  // There is no name, so it is not a call.
  delta->content += raw_ + held_.substr(0, found.at);
  held_.erase(0, found.at);
  if (found.mark == format_.arguments_open) {
    delta->content += found.mark;
    held_.erase(0, found.mark.size());
  }
  fenced_ = false;
  state_ = State::kClose;
  return true;
}

bool JsonCallParser::StepArguments(ToolDelta* delta) {
  if (arguments_.depth() == 0) DropSpace(&held_);
  if (held_.empty()) return false;
  // none, or not an object: ends at the closing marker
  bool done = arguments_.depth() == 0 && held_.front() != '{';
  bool waits = false;
  size_t taken = 0;
  while (!done && taken < held_.size()) {
    done = ClosesHere(taken, &waits);
    if (done || waits) break;
    const auto step = arguments_.Take(held_[taken]);
    if (step != JsonValueScan::Step::kBroken) ++taken;
    done = step != JsonValueScan::Step::kInside;
  }
  // White space between members is held back, because it may precede the closing marker.
  std::string arguments = std::exchange(space_, {}) + held_.substr(0, taken);
  held_.erase(0, taken);
  if (!format_.arguments_close.empty() && !arguments_.in_string()) {
    const size_t written = arguments.find_last_not_of(kSpace);
    const size_t end = written == std::string::npos ? 0 : written + 1;
    space_ = arguments.substr(end);
    arguments.erase(end);
  }
  Emit(delta, "", "", std::move(arguments));
  if (!done) return false;
  skips_ = !argued_;
  if (!argued_) Emit(delta, "", "", "{}");
  raw_.clear();
  state_ = State::kClose;
  return true;
}

// Returns whether incomplete arguments end at `at`, because a closing marker follows. Sets `waits` if that
// depends on more text.
bool JsonCallParser::ClosesHere(size_t at, bool* waits) const {
  if (format_.arguments_close.empty()) return false;
  const std::string_view rest = std::string_view(held_).substr(at);
  if (!arguments_.in_string()) return rest.front() == format_.arguments_close.front();
  if (rest.front() != '\n') return false;
  const std::string closing = fmt::format("\n{}{}", format_.arguments_close, format_.call_close);
  *waits = rest.size() < closing.size() && closing.starts_with(rest);
  return rest.starts_with(closing);
}

bool JsonCallParser::StepObject(ToolDelta* delta) {
  bool done = false;
  size_t taken = 0;
  if (raw_ == format_.call_open) {
    const size_t first = held_.find_first_not_of(kSpace);
    if (first == std::string::npos) return false;
    if (held_[first] != '{') {  // not an object: not a call
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
  // Without a marker, an object that only has a "name" may be any JSON.
  if (object_.named() && (object_.argued() || !format_.starts_bare)) {
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

// Consumes text after a call up to its closing marker.
bool JsonCallParser::StepClose(ToolDelta* delta) {
  if (!format_.section_open.empty()) return StepSectionClose(delta);
  DropSpace(&held_);
  if (held_.starts_with(format_.call_close)) {
    held_.erase(0, format_.call_close.size());
  } else if (format_.call_close.starts_with(held_)) {
    return false;
  }
  called_ = true;  // text may follow an unclosed call
  state_ = State::kText;
  return true;
}

// Consumes text up to the marker that closes the call, or opens or closes the next element. Text other than
// arguments_close is content, unless it replaces the arguments: "null" means none.
bool JsonCallParser::StepSectionClose(ToolDelta* delta) {
  const std::initializer_list<std::string_view> marks = {format_.call_close, format_.call_open,
                                                         format_.section_close};
  size_t end = std::min(FindMark(held_, marks).at, held_.size() - BegunAtEnd(held_, marks));
  if (fenced_) {
    const size_t start = std::min(held_.find_first_not_of(kSpace), end);
    const std::string_view text = std::string_view(held_).substr(start, end - start);
    if (text.starts_with(format_.arguments_close)) {
      held_.erase(0, start + format_.arguments_close.size());
      end -= start + format_.arguments_close.size();
    } else if (end == held_.size() && format_.arguments_close.starts_with(text)) {
      return false;
    }
    fenced_ = false;
  }
  if (skips_) {
    held_.erase(0, end);
  } else {
    MoveText(&held_, end, &delta->content);
  }
  const FoundMark found = FindMark(held_, marks);
  if (found.mark.empty()) return false;
  if (found.mark == format_.call_close) {
    if (!raw_.empty()) delta->content += found.mark;  // it closes something that is not a call
    held_.erase(0, found.at + found.mark.size());
  }
  raw_.clear();
  called_ = true;
  state_ = State::kSection;
  return true;
}

}  // namespace moesaic::text
