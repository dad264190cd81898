// Pieces of Lark grammars that frame calls of tools.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "server/chat_prompt.h"
#include "text/tokenizer.h"
#include "text/tool_calls.h"

namespace moesaic::server {

/// Literal text as Lark terms. Special tokens inside it are named by id, as text cannot spell them; "\n?" is
/// a line break that may be left out.
class LarkTerms {
 public:
  /// `tokenizer` is borrowed.
  LarkTerms(const text::Tokenizer& tokenizer, text::ToolFormat format)
      : tokenizer_(tokenizer), marks_(text::ToolMarks(format)) {}

  std::string Of(std::string_view text) const;
  /// `text` up to its first special token, and the rest.
  std::pair<std::string_view, std::string_view> SplitAtMark(std::string_view text) const;

 private:
  // Length of the special token that `text` begins with; 0: none.
  size_t MarkAtStart(std::string_view text) const;

  const text::Tokenizer& tokenizer_;
  const std::vector<std::string_view> marks_;
};

/// The schema of a function's arguments; any object where it has none.
Json ParametersOf(const Json& function);
/// Whether a forced call may be one of the tool `name`, and whether there may be several.
bool MayCall(const Conversation& conversation, const std::string& name);
bool MayCallSeveral(const Conversation& conversation);

}  // namespace moesaic::server
