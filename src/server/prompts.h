// Reads prompts of /v1/completions and /v1/embeddings.
#pragma once

#include <string>
#include <vector>

#include "server/json_fields.h"
#include "server/served_model.h"

namespace moesaic::server {

/// Reads a string, strings, token ids, or lists of token ids from the field `name`. With `special`, texts get
/// the special tokens that the model expects around them.
StatusOr<std::vector<std::vector<int32_t>>> ReadPrompts(const ServedModel& model, const Json& prompt,
                                                        const std::string& name, bool special);

}  // namespace moesaic::server
