#include "engine/rank_capacity.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "cache/kv_store.h"
#include "engine/kv_budget.h"
#include "engine/rank_messages.h"

namespace moesaic::engine {

StatusOr<RankCapacity> CapacityOfRank(const models::KvSpec& kv, const CapacityQuestion& question,
                                      int local_ranks) {
  const tensor::KvLayout layout =
      LayoutFor(kv, question.dtype, question.key_summaries, question.summary_kind);
  const EngineOptions options = {
      .kv_bytes = question.kv_bytes, .max_sequences = question.max_sequences, .local_ranks = local_ranks};
  RankCapacity capacity;
  ASSIGN_OR_RETURN(capacity.blocks,
                   cache::KvStore::BlocksFor(
                       layout, KvBudget(layout, options, question.context, question.reserved_bytes)));
  ASSIGN_OR_RETURN(capacity.slots, cache::KvTiers::SlotsFor(layout, {.swap_bytes = question.swap_bytes,
                                                                     .warm_bytes = question.warm_bytes,
                                                                     .warm_exact = question.warm_exact}));
  return capacity;
}

StatusOr<RankCapacity> CapacityOfReplica(const models::ModelInfo& info, const CapacityQuestion& question,
                                         const EngineOptions& options, int replica) {
  constexpr int kMax = std::numeric_limits<int>::max();
  RankCapacity least = {.blocks = kMax, .slots = {.swap = kMax, .warm = kMax}};
  const auto include = [&least](const RankCapacity& capacity) {
    least.blocks = std::min(least.blocks, capacity.blocks);
    least.slots.swap = std::min(least.slots.swap, capacity.slots.swap);
    least.slots.warm = std::min(least.slots.warm, capacity.slots.warm);
  };
  if (replica == 0) {
    ASSIGN_OR_RETURN(const RankCapacity own, CapacityOfRank(info.kv, question, options.local_ranks));
    include(own);
  }
  if (options.job == nullptr || options.layout.ranks() == 1) return least;
  comm::Transport& job = *options.job;
  std::vector<int> remote;
  for (int rank = 1; rank < options.layout.ranks(); ++rank) {
    if (options.layout.At(rank).replica == replica) remote.push_back(rank);
  }
  MessageWriter body;
  body.Put(RankCommand::kCapacity);
  body.Put(question);
  MessageSender commands(job);
  RETURN_IF_ERROR(commands.Start(remote, RankTag::kCommand, {body.bytes()}));
  RETURN_IF_ERROR(commands.Finish(options.rank_time_limit_s));
  for (const int rank : remote) {
    ASSIGN_OR_RETURN(const std::string reply,
                     AwaitLoadedRank(job, rank, options.check_ranks, options.rank_time_limit_s));
    MessageReader reader(reply);
    const auto code = reader.Get<StatusCode>();
    const std::string_view text = reader.GetText();
    if (code != StatusCode::kOk) return Status(code, fmt::format("rank {}: {}", rank, text));
    const auto capacity = reader.Get<RankCapacity>();
    RETURN_IF_ERROR(reader.Finish());
    if (capacity.blocks < 1 || capacity.slots.swap < (question.swap_bytes > 0 ? 1 : 0) ||
        capacity.slots.warm < (question.warm_bytes > 0 ? 1 : 0)) {
      return InvalidArgument("rank {} has {} KV blocks, {} swap slots and {} warm slots", rank,
                             capacity.blocks, capacity.slots.swap, capacity.slots.warm);
    }
    include(capacity);
  }
  return least;
}

}  // namespace moesaic::engine
