// Identifies the computation of KV blocks: blocks with equal fingerprints can replace one another.
#pragma once

#include <string>

#include "base/status.h"
#include "cache/block_pool.h"
#include "cache/kv_store.h"
#include "engine/engine.h"
#include "engine/executor.h"
#include "models/model.h"

namespace moesaic::engine {

/// Names the model, the way its rows choose blocks, and the checksum of a block that it computes for made-up
/// tokens: other weights, formats, experts per token, kernels or versions that compute otherwise give another
/// fingerprint. All blocks of `pool` are free. Fails with the model.
StatusOr<std::string> KvFingerprint(const models::ModelInfo& info, const EngineOptions& options,
                                    Executor& executor, const cache::KvStore& store, cache::BlockPool& pool);

}  // namespace moesaic::engine
