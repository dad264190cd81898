#include "engine/rank_capacity.h"

#include <algorithm>

#include "cache/kv_store.h"
#include "engine/kv_budget.h"
#include "engine/rank_messages.h"

namespace moesaic::engine {
StatusOr<int> BlocksOfRank(const models::KvSpec& kv, const CapacityQuestion& question, int local_ranks) {
  const tensor::KvLayout layout =
      LayoutFor(kv, question.dtype, question.key_summaries, question.summary_kind);
  const EngineOptions options = {
      .kv_bytes = question.kv_bytes, .max_sequences = question.max_sequences, .local_ranks = local_ranks};
  return cache::KvStore::BlocksFor(layout,
                                   KvBudget(layout, options, question.context, question.reserved_bytes));
}

StatusOr<int> BlocksOfReplica(const models::ModelInfo& info, const CapacityQuestion& question,
                              const EngineOptions& options, int replica) {
  std::vector<int> counts;
  if (replica == 0) {
    ASSIGN_OR_RETURN(counts.emplace_back(), BlocksOfRank(info.kv, question, options.local_ranks));
  }
  if (options.job == nullptr || options.layout.ranks() == 1) return counts.front();
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
    counts.push_back(reader.Get<int>());
    RETURN_IF_ERROR(reader.Finish());
    if (counts.back() < 1) return InvalidArgument("rank {} has {} KV blocks", rank, counts.back());
  }
  return std::ranges::min(counts);
}

}  // namespace moesaic::engine
