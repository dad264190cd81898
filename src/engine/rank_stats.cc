#include "engine/rank_stats.h"

#include <algorithm>
#include <map>

namespace moesaic::engine {
namespace {

void AddTotals(const RankStats& part, RankStats* total) {
  total->rank = part.rank;
  total->step_seconds += part.step_seconds;
  total->exchange_seconds += part.exchange_seconds;
  total->bytes_sent += part.bytes_sent;
  total->sent_rows += part.sent_rows;
  total->expert_rows += part.expert_rows;
  total->expert_seconds += part.expert_seconds;
  total->splits += part.splits;
  total->split_seconds += part.split_seconds;
  total->busiest_rows += part.busiest_rows;
  total->mean_rows += part.mean_rows;
  total->spilled_experts += part.spilled_experts;
  total->spilled_bytes += part.spilled_bytes;
  total->prefetched_experts += part.prefetched_experts;
  total->used_prefetched_experts += part.used_prefetched_experts;
  total->timed_rows += part.timed_rows;
  total->timed_seconds += part.timed_seconds;
  for (int level = 0; level < kLinkLevels; ++level) total->level_bytes[level] += part.level_bytes[level];
}

double Computing(const RankStats& stats) { return stats.step_seconds - stats.exchange_seconds; }

void SetImbalance(std::vector<RankStats>* totals) {
  double computing = 0;
  for (const RankStats& total : *totals) computing += Computing(total);
  const double mean = computing / static_cast<double>(totals->size());
  for (RankStats& total : *totals) total.imbalance = mean > 0 ? Computing(total) / mean : 1;
}

}  // namespace

void AddWork(std::span<const RankStats> step, std::vector<RankStats>* totals) {
  totals->resize(std::max(totals->size(), step.size()));
  for (size_t i = 0; i < step.size(); ++i) AddTotals(step[i], &(*totals)[i]);
  SetImbalance(totals);
}

std::vector<RankStats> MergeByRank(std::span<const RankStats> parts) {
  std::map<int, RankStats> by_rank;
  for (const RankStats& part : parts) AddTotals(part, &by_rank[part.rank]);
  std::vector<RankStats> totals;
  for (const auto& [rank, total] : by_rank) totals.push_back(total);
  SetImbalance(&totals);
  return totals;
}

}  // namespace moesaic::engine
