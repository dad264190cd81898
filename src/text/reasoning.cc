#include "text/reasoning.h"

#include <algorithm>
#include <utility>

#include "text/markers.h"

namespace moesaic::text {
namespace {

constexpr std::string_view kBlanks = " \t\r\n";

}  // namespace

StatusOr<ReasoningFormat> ParseReasoningFormat(std::string_view name) {
  for (const auto format : {ReasoningFormat::kNone, ReasoningFormat::kThink, ReasoningFormat::kPangu}) {
    if (name == Name(format)) return format;
  }
  return InvalidArgument("reasoning format must be none, think or pangu, found \"{}\"", name);
}

const char* Name(ReasoningFormat format) {
  switch (format) {
    case ReasoningFormat::kThink:
      return "think";
    case ReasoningFormat::kPangu:
      return "pangu";
    default:
      return "none";
  }
}

ReasoningFormat DetectReasoningFormat(std::string_view template_source) {
  if (template_source.find("[unused17]") != std::string_view::npos) return ReasoningFormat::kPangu;
  if (template_source.find("</think>") != std::string_view::npos) return ReasoningFormat::kThink;
  return ReasoningFormat::kNone;
}

std::string_view ReasoningOpen(ReasoningFormat format) {
  if (format == ReasoningFormat::kThink) return "<think>";
  return format == ReasoningFormat::kPangu ? "[unused16]" : "";
}

std::string_view ReasoningClose(ReasoningFormat format) {
  if (format == ReasoningFormat::kThink) return "</think>";
  return format == ReasoningFormat::kPangu ? "[unused17]" : "";
}

bool EndsInReasoning(ReasoningFormat format, std::string_view prompt) {
  if (format == ReasoningFormat::kNone) return false;
  const size_t end = prompt.find_last_not_of(kBlanks);
  return end != std::string_view::npos && prompt.substr(0, end + 1).ends_with(ReasoningOpen(format));
}

ReasoningSplitter::ReasoningSplitter(ReasoningFormat format, bool starts_inside, std::string_view call_open)
    : open_(ReasoningOpen(format)),
      close_(ReasoningClose(format)),
      call_open_(call_open),
      state_(State::kStart) {
  if (format == ReasoningFormat::kNone) state_ = State::kContent;
  if (starts_inside && format != ReasoningFormat::kNone) state_ = State::kInside;
}

void ReasoningSplitter::Push(std::string_view piece, std::string* reasoning, std::string* content) {
  if (state_ == State::kContent) {
    content->append(piece);
    return;
  }
  held_.append(piece);
  Step(/*last=*/false, reasoning, content);
}

std::string ReasoningSplitter::Finish(std::string* reasoning, std::string* content) {
  Step(/*last=*/true, reasoning, content);
  return std::exchange(held_, {});
}

void ReasoningSplitter::Step(bool last, std::string* reasoning, std::string* content) {
  if (state_ == State::kStart) {
    const size_t start = std::min(held_.find_first_not_of(kBlanks), held_.size());
    const std::string_view text = std::string_view(held_).substr(start);
    if (text.starts_with(open_)) {
      held_.erase(0, start + open_.size());
      state_ = State::kInside;
    } else if (last || !open_.starts_with(text)) {
      state_ = State::kContent;
    } else {
      return;
    }
  }
  if (state_ == State::kInside) {
    if (!has_text_) {
      const size_t before = held_.size();
      held_.erase(0, std::min(held_.find_first_not_of(kBlanks), held_.size()));
      // The prompt opened the reasoning; some models repeat the opening marker.
      if (held_.starts_with(open_)) held_.erase(0, open_.size());
      if (!last && !held_.empty() && open_.starts_with(held_)) return;
      held_.erase(0, std::min(held_.find_first_not_of(kBlanks), held_.size()));
      searched_ -= std::min(searched_, before - held_.size());
    }
    // Text after a call marker is held until the reasoning ends. searched_ ensures that each piece is
    // searched once.
    const size_t end = held_.find(close_, searched_ < close_.size() ? 0 : searched_ - close_.size() + 1);
    const bool closed = end != std::string::npos;
    size_t settled = closed ? end : held_.size() - (last ? 0 : BegunAtEnd(held_, {close_, call_open_}));
    if (!closed) settled = std::min(settled, FindMark(held_, {call_open_}).at);
    const size_t written = held_.find_last_not_of(kBlanks, settled == 0 ? 0 : settled - 1);
    settled = settled == 0 || written == std::string::npos ? 0 : std::min(settled, written + 1);
    reasoning->append(held_, 0, settled);
    has_text_ = has_text_ || settled > 0;
    held_.erase(0, closed ? end + close_.size() : settled);
    if (!closed) {
      searched_ = held_.size();
      if (last && FindMark(held_, {call_open_}).mark.empty()) held_.clear();
      return;
    }
    state_ = State::kAfter;
  }
  if (state_ == State::kAfter) {
    held_.erase(0, std::min(held_.find_first_not_of(kBlanks), held_.size()));
    if (held_.empty()) return;
    state_ = State::kContent;
  }
  content->append(held_);
  held_.clear();
}

}  // namespace moesaic::text
