// The grammar of an output that must be calls of tools.
#pragma once

#include <string>

#include "base/status.h"
#include "server/chat_prompt.h"
#include "text/tokenizer.h"
#include "text/tool_calls.h"

namespace moesaic::server {

/// A Lark grammar (as llguidance reads it) of one call, or of several where `conversation` allows it, in the
/// words of `format`, with arguments that follow the tools' schemas. Only the named tool's with kNamed.
/// Unimplemented for kNone.
StatusOr<std::string> ToolGrammar(text::ToolFormat format, const text::Tokenizer& tokenizer,
                                  const Conversation& conversation);

}  // namespace moesaic::server
