// Creates the executor of an engine: of this process alone, or of the ranks of a job.
#pragma once

#include <memory>

#include "base/status.h"
#include "cache/kv_store.h"
#include "engine/engine.h"
#include "engine/executor.h"

namespace moesaic::engine {

/// Uses job, layout, rank_time_limit_s and sparsity of `options`. The arguments are borrowed. With several
/// ranks it has those of `replica` create stores of these sizes, and returns their errors. `store` is that of
/// this process; null: it has no part of the replica.
StatusOr<std::unique_ptr<Executor>> MakeExecutor(models::Model& model, const kernels::KernelTable& kernels,
                                                 runtime::ThreadPool& threads,
                                                 const cache::KvStoreOptions& sizes, cache::KvStore* store,
                                                 const EngineOptions& options, int replica);

}  // namespace moesaic::engine
