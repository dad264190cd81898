// One choice's tokens as they become text: decoded, cut at stop strings, and split into thoughts, calls and
// content.
#pragma once

#include <memory>
#include <string>

#include "engine/stop_strings.h"
#include "server/generation.h"
#include "text/reasoning.h"
#include "text/tokenizer.h"
#include "text/tool_calls.h"

namespace moesaic::server {

class ChoiceText {
 public:
  ChoiceText(const ServedModel& model, const GenerationSpec& spec);

  /// Appends what the token settles to `delta`. True when a stop string was met: the choice is over.
  StatusOr<bool> Push(int32_t id, ChoiceDelta* delta);
  /// No more tokens come: appends what was held back.
  Status Finish(ChoiceDelta* delta);

  const std::string& stop() const { return stops_.match(); }
  int calls() const { return calls_->calls(); }
  bool in_reasoning() const { return reasoning_.inside(); }

 private:
  bool Shown(int32_t id) const;
  void Route(const std::string& text, ChoiceDelta* delta);

  const text::Tokenizer& tokenizer_;
  const bool skip_special_, include_stop_;
  std::vector<std::string_view> marks_;  // special tokens that the parsers need
  text::StreamingDecoder decoder_;
  engine::StopStrings stops_;
  text::ReasoningSplitter reasoning_;
  std::unique_ptr<text::ToolCallParser> calls_;
};

}  // namespace moesaic::server
