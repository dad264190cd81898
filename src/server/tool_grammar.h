// Writes the grammar of an output that must be calls of tools.
#pragma once

#include <cstddef>
#include <string>

#include "base/status.h"
#include "server/chat_prompt.h"
#include "text/tokenizer.h"
#include "text/tool_calls.h"

namespace moesaic::server {

/// Returns a Lark grammar for llguidance of one call, or of several where `conversation` allows it, in
/// `format`. Arguments follow the tools' schemas. With ToolUse::kNamed only the named tool may be called.
/// Unimplemented for ToolFormat::kNone. InvalidArgument if references to schemas make a text of more than
/// `most_bytes`.
StatusOr<std::string> ToolGrammar(text::ToolFormat format, const text::Tokenizer& tokenizer,
                                  const Conversation& conversation, size_t most_bytes);

}  // namespace moesaic::server
