// Who computes KV blocks: what they must have in common to be used for one another.
#pragma once

#include <string>

#include "base/status.h"
#include "cache/kv_pool.h"
#include "engine/engine.h"
#include "engine/executor.h"
#include "models/model.h"

namespace moesaic::engine {

/// Names the model, how its rows choose blocks, and what it makes of a block of made-up tokens: other
/// weights, formats, experts a token, kernels or versions that compute otherwise give other names. `blocks`
/// are all free. Fails with the model.
StatusOr<std::string> MakerOf(const models::ModelInfo& info, const EngineOptions& options, Executor& executor,
                              cache::KvPool& blocks);

}  // namespace moesaic::engine
