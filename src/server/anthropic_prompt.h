// Reads a conversation in the form of Anthropic's Messages API.
#pragma once

#include "server/chat_prompt.h"
#include "server/json_fields.h"

namespace moesaic::server {

/// Reads "system", "messages", "tools", "tool_choice" and "thinking".
Conversation ReadMessages(Fields& body);

}  // namespace moesaic::server
