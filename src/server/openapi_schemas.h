// JSON schemas of the requests' bodies, as GET /openapi.json shows them. They say no more and no less than
// the endpoints' readers check of types and ranges; tests/server/schema_test.py holds the two together.
#pragma once

#include "server/json_fields.h"
#include "server/served_model.h"

namespace moesaic::server {

Json ChatSchema(const ServedModel& model);
Json CompletionSchema(const ServedModel& model);
Json ResponsesSchema(const ServedModel& model);
Json ConversationSchema(const ServedModel& model);
Json ConversationUpdateSchema(const ServedModel& model);
Json ConversationItemsSchema(const ServedModel& model);
Json EmbeddingsSchema(const ServedModel& model);
Json MessagesSchema(const ServedModel& model);
Json CountTokensSchema(const ServedModel& model);
Json TokenizeSchema(const ServedModel& model);
Json DetokenizeSchema(const ServedModel& model);
Json RenderSchema(const ServedModel& model);

}  // namespace moesaic::server
