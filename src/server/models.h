// GET /v1/models, in OpenAI's form and in Anthropic's.
#pragma once

#include <string>

#include "server/call.h"

namespace moesaic::server {

/// Requests with a header "anthropic-version" get Anthropic's form. `root` is the model's path.
Status ListModels(const ServedModel& model, const std::string& root, Call& call);
Status GetModel(const ServedModel& model, const std::string& root, Call& call);

}  // namespace moesaic::server
