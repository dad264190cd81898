// Implements GET /v1/models in OpenAI's and in Anthropic's form.
#pragma once

#include <string>

#include "server/call.h"

namespace moesaic::server {

/// Answers requests with a header "anthropic-version" in Anthropic's form. `root` is the model's path.
Status ListModels(const ServedModel& model, const std::string& root, Call& call);
Status GetModel(const ServedModel& model, const std::string& root, Call& call);

}  // namespace moesaic::server
