#include "engine/make_executor.h"

#include "engine/local_executor.h"
#include "engine/ranked_executor.h"

namespace moesaic::engine {

StatusOr<std::unique_ptr<Executor>> MakeExecutor(models::Model& model, const kernels::KernelTable& kernels,
                                                 runtime::ThreadPool& threads,
                                                 const cache::KvStoreOptions& sizes, cache::KvStore* store,
                                                 const EngineOptions& options, int replica) {
  std::unique_ptr<LocalExecutor> local;
  if (store != nullptr) {
    local = std::make_unique<LocalExecutor>(model, kernels, threads, *store, options.sparsity.dense_layers);
  }
  if (options.job == nullptr || options.layout.ranks() == 1) return local;
  const RankSetup setup = {.dtype = sizes.layout.dtype,
                           .key_summaries = options.sparsity.key_summaries,
                           .summary_kind = options.sparsity.summary_kind,
                           .blocks = sizes.blocks,
                           .swap_slots = sizes.swap_slots,
                           .warm_slots = sizes.warm_slots,
                           .warm_exact = sizes.warm_exact,
                           .first_sparse_layer = options.sparsity.dense_layers};
  ASSIGN_OR_RETURN(
      std::unique_ptr<RankedExecutor> ranked,
      RankedExecutor::Create(std::move(local), threads, model.info(), *options.job, options.layout, setup,
                             options.rank_time_limit_s, replica, options.check_ranks));
  return ranked;
}

}  // namespace moesaic::engine
