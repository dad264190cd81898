// Prompts as /v1/completions and /v1/embeddings take them.
#pragma once

#include <string>
#include <vector>

#include "server/json_fields.h"
#include "server/served_model.h"

namespace moesaic::server {

/// A string, strings, token ids, or lists of token ids. `special`: texts get the tokens that the model
/// expects around one. `name` is the field's.
StatusOr<std::vector<std::vector<int32_t>>> ReadPrompts(const ServedModel& model, const Json& prompt,
                                                        const std::string& name, bool special);

}  // namespace moesaic::server
