// Writes the parts of Lark grammars that frame calls of tools.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "server/chat_prompt.h"
#include "text/tokenizer.h"
#include "text/tool_calls.h"

namespace moesaic::server {

/// Converts literal text to Lark terms. Names special tokens by their id, since text does not match them.
/// "\n?" is an optional line break.
class LarkTerms {
 public:
  /// `tokenizer` must outlive this.
  LarkTerms(const text::Tokenizer& tokenizer, text::ToolFormat format)
      : tokenizer_(tokenizer), marks_(text::ToolMarks(format)) {}

  std::string Of(std::string_view text) const;
  /// Splits `text` before its first special token.
  std::pair<std::string_view, std::string_view> SplitAtMark(std::string_view text) const;

 private:
  // Length of the special token that `text` begins with, or 0.
  size_t MarkAtStart(std::string_view text) const;

  const text::Tokenizer& tokenizer_;
  const std::vector<std::string_view> marks_;
};

/// Returns the schema of a function's arguments, or that of any object where the function has none.
Json ParametersOf(const Json& function);
/// Return true if a forced call may call the tool `name`, and if there may be several calls.
bool MayCall(const Conversation& conversation, const std::string& name);
bool MayCallSeveral(const Conversation& conversation);

}  // namespace moesaic::server
