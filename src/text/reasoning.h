// Splits what a model thinks from what it answers, while the text still comes.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace moesaic::text {

/// How a model's template marks its thoughts.
enum class ReasoningFormat {
  kNone,
  kThink,  ///< <think> ... </think>: DeepSeek-R1, Qwen3, Kimi-K2-Thinking, GLM-4.5, MiniMax
  kPangu,  ///< [unused16] ... [unused17]: openPangu
};

/// "none", "think" or "pangu".
StatusOr<ReasoningFormat> ParseReasoningFormat(std::string_view name);
const char* Name(ReasoningFormat format);
/// The format whose marks stand in a chat template's source.
ReasoningFormat DetectReasoningFormat(std::string_view template_source);
/// The opening and the closing mark; empty for kNone.
std::string_view ReasoningOpen(ReasoningFormat format);
std::string_view ReasoningClose(ReasoningFormat format);
/// The prompt ends inside an open thought, as templates that write the opening mark themselves leave it.
bool EndsInReasoning(ReasoningFormat format, std::string_view prompt);

/// One output's way through; any text is taken, cut anywhere. White space around a thought is left out.
///
/// Some models call a tool without closing their thought. Text from `call_open` on is therefore held back
/// inside a thought: it belongs to the thought if that is closed, and is left to the caller if it is not.
class ReasoningSplitter {
 public:
  /// `call_open`: the mark that opens a call; empty: thoughts are never held back for one.
  ReasoningSplitter(ReasoningFormat format, bool starts_inside, std::string_view call_open = "");

  /// Appends what `piece` settles.
  void Push(std::string_view piece, std::string* reasoning, std::string* content);
  /// The output is over: appends the text that was held back. Returns the text of an unclosed thought from
  /// `call_open` on, which is in neither; empty: there is none.
  std::string Finish(std::string* reasoning, std::string* content);
  bool inside() const { return state_ == State::kInside; }

 private:
  enum class State { kStart, kInside, kBehind, kContent };
  void Step(bool last, std::string* reasoning, std::string* content);

  const std::string_view open_, close_, call_open_;
  State state_;
  bool said_ = false;  // a thought has begun with more than white space
  std::string held_;
  size_t searched_ = 0;  // bytes of held_ that do not begin the closing mark
};

}  // namespace moesaic::text
