// Creates the executor of an engine: of this process alone, or of the ranks of a job.
#pragma once

#include <memory>

#include "base/status.h"
#include "cache/kv_store.h"
#include "engine/engine.h"
#include "engine/executor.h"

namespace moesaic::engine {

/// Uses job, layout, rank_time_limit_s, sparsity and warm_exact of `options`. The arguments are borrowed.
/// With several ranks it has them create caches like `store`, and returns their errors.
StatusOr<std::unique_ptr<Executor>> MakeExecutor(models::Model& model, const kernels::KernelTable& kernels,
                                                 runtime::ThreadPool& threads, cache::KvStore& store,
                                                 const EngineOptions& options);

}  // namespace moesaic::engine
