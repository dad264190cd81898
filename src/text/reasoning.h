// Separates a model's reasoning from its answer while the output streams.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace moesaic::text {

/// Markers of reasoning in a model's template.
enum class ReasoningFormat {
  kNone,
  kThink,  ///< <think> ... </think>: DeepSeek-R1, Qwen3, Kimi-K2-Thinking, GLM-4.5, MiniMax
  kPangu,  ///< [unused16] ... [unused17]: openPangu
};

/// Parses "none", "think" or "pangu".
StatusOr<ReasoningFormat> ParseReasoningFormat(std::string_view name);
const char* Name(ReasoningFormat format);
/// Returns the format whose markers a chat template's source contains.
ReasoningFormat DetectReasoningFormat(std::string_view template_source);
/// Returns the opening and the closing marker; empty for kNone.
std::string_view ReasoningOpen(ReasoningFormat format);
std::string_view ReasoningClose(ReasoningFormat format);
/// Returns whether the prompt ends inside open reasoning, because the template itself writes the opening
/// marker.
bool EndsInReasoning(ReasoningFormat format, std::string_view prompt);

/// Splits one output. It accepts any text, cut at any position, and drops white space around the reasoning.
///
/// Some models call a tool without closing their reasoning. Text from `call_open` on is therefore held back
/// inside reasoning: it is reasoning if the closing marker follows, otherwise Finish() returns it to the
/// caller.
class ReasoningSplitter {
 public:
  /// `call_open`: marker that opens a call; empty: reasoning is never held back for a call.
  ReasoningSplitter(ReasoningFormat format, bool starts_inside, std::string_view call_open = "");

  /// Consumes `piece` and appends the text that is now determined.
  void Push(std::string_view piece, std::string* reasoning, std::string* content);
  /// Ends the output and appends the text that was held back. Returns the text of unclosed reasoning from
  /// `call_open` on, which was appended to neither string; empty if there is none.
  std::string Finish(std::string* reasoning, std::string* content);
  bool inside() const { return state_ == State::kInside; }

 private:
  enum class State { kStart, kInside, kAfter, kContent };
  void Step(bool last, std::string* reasoning, std::string* content);

  const std::string_view open_, close_, call_open_;
  State state_;
  bool has_text_ = false;  // the reasoning contains more than white space
  std::string held_;
  size_t searched_ = 0;  // bytes of held_ that cannot begin the closing marker
};

}  // namespace moesaic::text
