#include "server/choice_text.h"

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

namespace moesaic::server {

ChoiceText::ChoiceText(const ServedModel& model, const GenerationSpec& spec)
    : tokenizer_(model.tokenizer),
      skip_special_(spec.skip_special),
      include_stop_(spec.include_stop),
      parallel_calls_(spec.parallel_calls),
      min_tokens_(spec.sampling.min_tokens),
      decoder_(model.tokenizer, /*skip_special=*/false),
      stops_(spec.stop),
      reasoning_(spec.reasoning, spec.in_reasoning, text::CallOpen(spec.tools)),
      calls_(text::MakeToolCallParser(spec.tools, spec.tools_json)) {
  marks_ = text::ToolMarks(spec.tools);
  if (spec.reasoning != text::ReasoningFormat::kNone) {
    marks_.push_back(text::ReasoningOpen(spec.reasoning));
    marks_.push_back(text::ReasoningClose(spec.reasoning));
  }
}

// Leaves special tokens out of the text, except those that frame calls and reasoning.
bool ChoiceText::Shown(int32_t id) const {
  if (!skip_special_ || !tokenizer_.IsSpecial(id)) return true;
  const std::string text = tokenizer_.IdToToken(id);
  return std::any_of(marks_.begin(), marks_.end(), [&text](std::string_view mark) {
    return !mark.empty() && mark.find(text) != std::string_view::npos;
  });
}

StatusOr<bool> ChoiceText::Push(int32_t id, ChoiceDelta* delta) {
  ++tokens_;
  if (!Shown(id)) return false;
  ASSIGN_OR_RETURN(const std::string piece, decoder_.Push(id));
  std::string text = stops_.Feed(piece, tokens_ > min_tokens_);
  if (stops_.matched() && include_stop_) text += stops_.match();
  Route(text, delta);
  return stops_.matched();
}

Status ChoiceText::Finish(ChoiceDelta* delta) {
  if (!stops_.matched()) {
    ASSIGN_OR_RETURN(const std::string piece, decoder_.Finish());
    std::string text = stops_.Feed(piece, tokens_ > min_tokens_);
    text += stops_.Finish();
    if (stops_.matched() && include_stop_) text += stops_.match();
    Route(text, delta);
  }
  text::ToolDelta parsed;
  std::string content;
  const std::string open = reasoning_.Finish(&delta->reasoning, &content);
  calls_->Push(open.empty() ? content : open, &parsed);
  calls_->Finish(&parsed);
  if (!open.empty() && calls_->calls() == 0) {  // reasoning about calls that was cut off
    delta->reasoning += open;
    return OkStatus();
  }
  Take(std::move(parsed), delta);
  return OkStatus();
}

void ChoiceText::Route(const std::string& text, ChoiceDelta* delta) {
  if (text.empty()) return;
  std::string content;
  reasoning_.Push(text, &delta->reasoning, &content);
  if (content.empty()) return;
  text::ToolDelta parsed;
  calls_->Push(content, &parsed);
  Take(std::move(parsed), delta);
}

void ChoiceText::Take(text::ToolDelta parsed, ChoiceDelta* delta) const {
  if (!parallel_calls_) {
    std::erase_if(parsed.calls, [](const text::ToolCallDelta& call) { return call.index > 0; });
  }
  delta->content += parsed.content;
  std::move(parsed.calls.begin(), parsed.calls.end(), std::back_inserter(delta->calls));
}

}  // namespace moesaic::server
