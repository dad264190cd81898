#include "engine/make_executor.h"

#include "engine/local_executor.h"
#include "engine/ranked_executor.h"

namespace moesaic::engine {

StatusOr<std::unique_ptr<Executor>> MakeExecutor(models::Model& model, const kernels::KernelTable& kernels,
                                                 runtime::ThreadPool& threads, cache::KvStore& store,
                                                 const EngineOptions& options) {
  auto local = std::make_unique<LocalExecutor>(model, kernels, threads, store, options.sparsity.dense_layers);
  if (options.job == nullptr || options.layout.ranks() == 1) return local;
  const RankSetup setup = {.dtype = store.layout().dtype,
                           .key_summaries = options.sparsity.key_summaries,
                           .summary_kind = options.sparsity.summary_kind,
                           .blocks = store.blocks(),
                           .swap_slots = store.slots(cache::KvArea::kSwap),
                           .warm_slots = store.slots(cache::KvArea::kWarm),
                           .warm_exact = options.warm_exact,
                           .first_sparse_layer = options.sparsity.dense_layers};
  ASSIGN_OR_RETURN(std::unique_ptr<RankedExecutor> ranked,
                   RankedExecutor::Create(std::move(local), model.info(), *options.job, options.layout, setup,
                                          options.rank_time_limit_s));
  return ranked;
}

}  // namespace moesaic::engine
