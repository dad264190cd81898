// Creates the executor of an engine: of this process alone, or of the ranks of a job.
#pragma once

#include <memory>

#include "base/status.h"
#include "cache/kv_store.h"
#include "engine/engine.h"
#include "engine/executor.h"

namespace moesaic::engine {

/// Returns a LocalExecutor for one rank, and a RankedExecutor for several. With several, each rank of
/// `replica` creates a KV store of `sizes`, and an error of any of them is returned. `store` is the KV store
/// of this process; null if this process is no rank of the replica. Of `options`, only job, layout,
/// rank_time_limit_s, check_ranks and sparsity are used. All arguments are borrowed.
StatusOr<std::unique_ptr<Executor>> MakeExecutor(models::Model& model, const kernels::KernelTable& kernels,
                                                 runtime::ThreadPool& threads,
                                                 const cache::KvStoreOptions& sizes, cache::KvStore* store,
                                                 const EngineOptions& options, int replica);

}  // namespace moesaic::engine
