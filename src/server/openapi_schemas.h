// JSON schemas of the requests' bodies for GET /openapi.json. They have the types and ranges that the
// endpoints' readers check; tests/server/schema_test.py compares the two.
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
