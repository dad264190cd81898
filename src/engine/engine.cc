#include "engine/engine.h"

#include <algorithm>
#include <utility>

#include "cache/kv_tiers.h"
#include "engine/continuous_engine.h"
#include "engine/kv_budget.h"
#include "engine/kv_fingerprint.h"
#include "engine/lockstep.h"
#include "engine/make_executor.h"
#include "engine/rank_capacity.h"
#include "engine/replicated_engine.h"
#include "models/pipeline_parts.h"

namespace moesaic::engine {
namespace {

// At this position attention costs a token as much as the rest of the model: it reads keys and values of
// `hidden_size` elements or fewer a layer and position, and does two operations with each.
int64_t AttentionTokens(const models::ModelInfo& info) {
  return std::max<int64_t>(
      1, info.active_parameters / std::max<int64_t>(1, int64_t{2} * info.hidden_size * info.layers));
}

std::unique_ptr<cache::EvictionPolicy> PolicyOf(const EngineOptions& options, const models::ModelInfo& info,
                                                int blocks) {
  if (options.eviction == "lru") return cache::MakeLruPolicy();
  // The policy remembers as many evicted runs as there are blocks: for about as long as they were cached.
  return cache::MakeCostAwarePolicy(AttentionTokens(info), blocks);
}

// With blocks for all sequences that run at once, or as many as a quarter of the free memory holds.
StatusOr<std::unique_ptr<ModelDrafter>> MakeModelDrafter(models::Model& model,
                                                         const kernels::KernelTable& kernels,
                                                         runtime::ThreadPool& threads, EngineOptions options,
                                                         int context) {
  options.kv_bytes = 0;
  ASSIGN_OR_RETURN(const tensor::DType dtype, KvDType(options.kv_dtype, model.info()));
  const tensor::KvLayout layout = LayoutFor(model.info().kv, dtype, /*key_summaries=*/false);
  const int room = std::min(context, model.info().context_length);
  ASSIGN_OR_RETURN(const int blocks,
                   cache::KvStore::BlocksFor(layout, KvBudget(layout, options, room, /*reserved_bytes=*/0)));
  ASSIGN_OR_RETURN(std::unique_ptr<cache::KvStore> store,
                   cache::KvStore::Create({.layout = layout, .blocks = blocks}, threads));
  return std::make_unique<ModelDrafter>(model, kernels, threads, std::move(store), options.max_batch_tokens);
}

// Creates all parts except the disk tier, whose files are identified by results of the model.
StatusOr<KvCache> MakeKvCache(const models::ModelInfo& info, runtime::ThreadPool& threads,
                              const tensor::KvLayout& layout, const RankCapacity& capacity,
                              const EngineOptions& options, int replica) {
  KvCache kv;
  kv.pool = std::make_unique<cache::BlockPool>(capacity.blocks);
  kv.tree = std::make_unique<cache::RadixTree>(*kv.pool, PolicyOf(options, info, capacity.blocks),
                                               options.kv_observer.get());
  const cache::KvTierOptions tiers = {.swap_bytes = options.swap_bytes,
                                      .attention_tokens = AttentionTokens(info),
                                      .warm_bytes = options.warm_bytes,
                                      .warm_exact = options.warm_exact,
                                      .warm_step_bytes = options.warm_step_bytes};
  kv.tiers = std::make_unique<cache::KvTiers>(*kv.pool, *kv.tree, layout, tiers, capacity.slots);
  kv.sizes = {.layout = layout, .blocks = capacity.blocks, .pageable_layers = info.own_layers.count};
  kv.tiers->AddSlots(&kv.sizes);
  if (replica == 0) {
    ASSIGN_OR_RETURN(kv.store, cache::KvStore::Create(kv.sizes, threads));
  }
  return kv;
}

Status CheckOptions(const EngineOptions& options, const models::ModelInfo& info) {
  if (options.max_sequences < 1) {
    return InvalidArgument("max_sequences must be at least 1, found {}", options.max_sequences);
  }
  if (options.max_batch_tokens < options.max_sequences) {
    return InvalidArgument("max_batch_tokens must be at least max_sequences ({}), found {}",
                           options.max_sequences, options.max_batch_tokens);
  }
  if (options.max_context < 0 || options.max_context > info.context_length) {
    return InvalidArgument("the model's context is {} tokens, fewer than the requested {}",
                           info.context_length, options.max_context);
  }
  if (options.eviction != "cost" && options.eviction != "lru") {
    return InvalidArgument("eviction must be cost or lru, found \"{}\"", options.eviction);
  }
  if (options.max_overtakes < 1) {
    return InvalidArgument("max_overtakes must be at least 1, found {}", options.max_overtakes);
  }
  if (options.swap_bytes < 0) {
    return InvalidArgument("swap_bytes must be at least 0, found {}", options.swap_bytes);
  }
  if (options.warm_bytes < 0) {
    return InvalidArgument("warm_bytes must be at least 0, found {}", options.warm_bytes);
  }
  if (options.warm_bytes > 0 && !options.prefix_cache) {
    return InvalidArgument("warm KV blocks ({} bytes) need the prefix cache, which is off",
                           options.warm_bytes);
  }
  if (options.disk && options.layout.ranks() > 1) {
    return InvalidArgument(
        "blocks on disk ({}) are not supported for {}: files have whole blocks, and each rank has a part",
        options.disk->folder, Name(options.layout.degrees()));
  }
  if (options.disk && !options.prefix_cache) {
    return InvalidArgument("blocks on disk ({}) need the prefix cache, which is off", options.disk->folder);
  }
  if (options.sparsity.dense_layers < 0) {
    return InvalidArgument("dense_layers must be at least 0, found {}", options.sparsity.dense_layers);
  }
  RETURN_IF_ERROR(CheckSparsity(options.sparsity.defaults, options.sparsity));
  for (const int32_t id : options.eos_ids) {
    if (id < 0 || id >= info.vocab_size) {
      return InvalidArgument("end-of-sequence id outside the vocabulary [0, {}): {}", info.vocab_size, id);
    }
  }
  return OkStatus();
}

Status CheckReplicas(const EngineOptions& options) {
  const parallel::Degrees& degrees = options.layout.degrees();
  if (options.balance.interval_s > 0 && !options.layout.experts_move()) {
    return InvalidArgument("experts can move if data parallel replicas divide them, which {} does not do",
                           Name(degrees));
  }
  if (options.balance.interval_s > 0 && options.expert_load.window_s <= 0) {
    return InvalidArgument(
        "moves of experts are planned from recorded loads: --expert-load-window must be positive");
  }
  if (degrees.data == 1) return OkStatus();
  if (options.kv_observer != nullptr) {
    return Unimplemented(
        "KV events describe one cache, but {} has one for each replica; start one server for each",
        Name(degrees));
  }
  return OkStatus();
}

// Creates the engine of a replica from resolved options. `lockstep` of replicas that exchange tokens, or
// null.
StatusOr<std::unique_ptr<ContinuousEngine>> MakeReplica(models::Model& model,
                                                        const kernels::KernelTable& kernels,
                                                        runtime::ThreadPool& pool,
                                                        const EngineOptions& options, int replica,
                                                        const std::shared_ptr<Lockstep>& lockstep) {
  const models::ModelInfo& info = model.info();
  const int context = options.max_context > 0 ? options.max_context : info.context_length;
  ASSIGN_OR_RETURN(const tensor::DType dtype, KvDType(options.kv_dtype, info));
  const tensor::KvLayout layout =
      LayoutFor(info.kv, dtype, options.sparsity.key_summaries, options.sparsity.summary_kind);
  const CapacityQuestion question = {.dtype = dtype,
                                     .key_summaries = options.sparsity.key_summaries,
                                     .summary_kind = options.sparsity.summary_kind,
                                     .kv_bytes = options.kv_bytes,
                                     .max_sequences = options.max_sequences,
                                     .context = context,
                                     .reserved_bytes = MoveBytes(info, options),
                                     .swap_bytes = options.swap_bytes,
                                     .warm_bytes = options.warm_bytes,
                                     .warm_exact = options.warm_exact};
  ASSIGN_OR_RETURN(const RankCapacity capacity, CapacityOfReplica(info, question, options, replica));
  ASSIGN_OR_RETURN(KvCache kv, MakeKvCache(info, pool, layout, capacity, options, replica));
  ASSIGN_OR_RETURN(std::unique_ptr<Executor> executor,
                   MakeExecutor(model, kernels, pool, kv.sizes, kv.store.get(), options, replica));
  if (lockstep != nullptr) executor = Lockstep::Add(lockstep, std::move(executor));
  std::unique_ptr<ModelDrafter> drafter;
  if (options.speculative.method == "draft") {
    ASSIGN_OR_RETURN(drafter,
                     MakeModelDrafter(*options.speculative.draft_model, kernels, pool, options, context));
  }
  if (options.disk) {
    ASSIGN_OR_RETURN(std::string fingerprint, KvFingerprint(info, options, *executor, *kv.store, *kv.pool));
    RETURN_IF_ERROR(kv.tiers->OpenDisk({.folder = options.disk->folder,
                                        .bytes = options.disk->bytes,
                                        .fingerprint = std::move(fingerprint),
                                        .step_bytes = options.disk->step_bytes},
                                       *kv.store));
  }
  return std::make_unique<ContinuousEngine>(info, pool, std::move(kv), std::move(executor),
                                            std::move(drafter), options, context);
}

}  // namespace

StatusOr<std::unique_ptr<Engine>> Engine::Create(models::Model& model, const kernels::KernelTable& kernels,
                                                 runtime::ThreadPool& pool, const EngineOptions& asked) {
  EngineOptions options = asked;
  RETURN_IF_ERROR(CheckOptions(options, model.info()));
  RETURN_IF_ERROR(CheckReplicas(options));
  ASSIGN_OR_RETURN(options.speculative, ResolveSpeculative(options.speculative, model.info()));
  std::shared_ptr<Lockstep> lockstep;  // null: replicas step alone
  if (options.layout.exchanges_tokens()) {
    Survival survival;
    if (options.layout.tolerates_failures()) {
      survival = {.job = options.job,
                  .time_limit_s = options.rank_time_limit_s,
                  .on_excluded = options.on_excluded_rank};
    }
    lockstep = std::make_shared<Lockstep>(
        options.layout.degrees().pipeline,
        models::ReadRows(model.info().experts, model.info().experts_per_token), std::move(survival));
  }
  std::vector<std::unique_ptr<ContinuousEngine>> replicas;
  for (int replica = 0; replica < options.layout.degrees().data; ++replica) {
    ASSIGN_OR_RETURN(replicas.emplace_back(), MakeReplica(model, kernels, pool, options, replica, lockstep));
  }
  if (replicas.size() == 1) return std::move(replicas.front());
  std::vector<std::string> link_levels;
  for (const auto& level : model.traffic().experts.levels) link_levels.push_back(level.name);
  std::unique_ptr<ExpertBalancer> balancer;
  if (options.balance.interval_s > 0 && model.info().experts > 0) {
    std::vector<Executor*> executors;
    for (const auto& replica : replicas) executors.push_back(&replica->executor());
    ExpertBalanceOptions balance = options.balance;
    balance.batch_tokens = static_cast<double>(options.max_batch_tokens) * options.layout.degrees().data;
    balancer = std::make_unique<ExpertBalancer>(options.layout, model.info(), *lockstep, std::move(executors),
                                                balance);
  }
  auto engine = std::make_unique<ReplicatedEngine>(std::move(replicas), options, std::move(link_levels));
  engine->SetBalancer(std::move(balancer));
  if (options.layout.tolerates_failures()) engine->Tolerate(lockstep, model);
  return engine;
}

}  // namespace moesaic::engine
