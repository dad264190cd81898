// The grammar of forced calls whose arguments come one by one between marks.
#pragma once

#include <string>

#include "base/status.h"
#include "server/chat_prompt.h"
#include "text/tokenizer.h"
#include "text/tool_calls.h"

namespace moesaic::server {

/// As ToolGrammar, for qwen3-coder, glm-4, minimax-m2 and deepseek-v3.2. Arguments come in the schema's
/// order. A string is free text up to the closing mark, of the schema's length or one of its `enum`; every
/// other value is JSON that follows its schema. InvalidArgument for a name that the marks cannot hold.
StatusOr<std::string> XmlToolGrammar(text::ToolFormat format, const text::Tokenizer& tokenizer,
                                     const Conversation& conversation);

}  // namespace moesaic::server
