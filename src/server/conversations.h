// Conversations that responses read and continue. Kept in ResponseStore, where "messages" are their items.
#pragma once

#include <string>

#include "server/call.h"

namespace moesaic::server {

/// The items of a kept conversation of the call's owner, or NotFound.
StatusOr<Json> ConversationItems(const GenerationContext& context, const Call& call, const std::string& id);

Status NoConversation(const std::string& id);

/// /v1/conversations, and what is below it.
Status CreateConversation(const GenerationContext& context, Call& call);
Status GetConversation(const GenerationContext& context, Call& call);
Status PostConversation(const GenerationContext& context, Call& call);
Status DeleteConversation(const GenerationContext& context, Call& call);

}  // namespace moesaic::server
