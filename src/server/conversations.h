// Conversations that responses read and continue. ResponseStore stores them, with their items as "messages".
#pragma once

#include <string>

#include "server/call.h"

namespace moesaic::server {

/// The items of a stored conversation of the call's owner, or NotFound.
StatusOr<Json> ConversationItems(const GenerationContext& context, const Call& call, const std::string& id);

/// Endpoints of /v1/conversations and of the paths below it.
Status CreateConversation(const GenerationContext& context, Call& call);
Status GetConversation(const GenerationContext& context, Call& call);
Status UpdateConversation(const GenerationContext& context, Call& call);
Status DeleteConversation(const GenerationContext& context, Call& call);
Status ListItems(const GenerationContext& context, Call& call);
Status AddItems(const GenerationContext& context, Call& call);
Status GetItem(const GenerationContext& context, Call& call);
Status DeleteItem(const GenerationContext& context, Call& call);

}  // namespace moesaic::server
