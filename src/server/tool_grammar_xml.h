// Writes the grammar of forced calls whose arguments are framed by marks one by one.
#pragma once

#include <cstddef>
#include <string>

#include "base/status.h"
#include "server/chat_prompt.h"
#include "text/tokenizer.h"
#include "text/tool_calls.h"

namespace moesaic::server {

/// Does the same as ToolGrammar for qwen3-coder, glm-4, minimax-m2 and deepseek-v3.2. Arguments have the
/// schema's order. A string is free text up to the closing mark, with the schema's length or `enum`. All
/// other values are JSON that follows its schema. InvalidArgument for a parameter name that the marks cannot
/// contain, and as soon as the rules exceed `most_bytes`: each parameter with references has a copy of its
/// tool's whole schema.
StatusOr<std::string> XmlToolGrammar(text::ToolFormat format, const text::Tokenizer& tokenizer,
                                     const Conversation& conversation, size_t most_bytes);

}  // namespace moesaic::server
