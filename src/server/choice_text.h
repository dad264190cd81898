// Decodes the tokens of one choice, ends it at stop strings, and splits its text into reasoning, tool calls
// and content.
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

  /// Appends the text that the token completes to `delta`. Returns true after a stop string, which ends the
  /// choice.
  StatusOr<bool> Push(int32_t id, ChoiceDelta* delta);
  /// Appends the text that was held back. No token may follow.
  Status Finish(ChoiceDelta* delta);

  const std::string& stop() const { return stops_.match(); }
  int calls() const { return calls_->calls(); }
  bool in_reasoning() const { return reasoning_.inside(); }

 private:
  bool Shown(int32_t id) const;
  void Route(const std::string& text, ChoiceDelta* delta);
  // Moves the parsed text, and the calls that the request allows, to `delta`.
  void Take(text::ToolDelta parsed, ChoiceDelta* delta) const;

  const text::Tokenizer& tokenizer_;
  const bool skip_special_, include_stop_, parallel_calls_;
  std::vector<std::string_view> marks_;  // marks whose special tokens the parsers need
  const int min_tokens_;                 // stop strings that end in them are ordinary text
  int tokens_ = 0;
  text::StreamingDecoder decoder_;
  engine::StopStrings stops_;
  text::ReasoningSplitter reasoning_;
  std::unique_ptr<text::ToolCallParser> calls_;
};

}  // namespace moesaic::server
