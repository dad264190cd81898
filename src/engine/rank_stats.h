// Work of the ranks of a model, for /metrics.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace moesaic::engine {

/// Levels of links whose bytes are counted apart.
inline constexpr int kLinkLevels = 4;

/// Totals of one rank over the engine's life.
struct RankStats {
  int rank = 0;
  double step_seconds = 0;      ///< Seconds spent in batches: computation and exchange.
  double exchange_seconds = 0;  ///< Part of step_seconds: sums over shards, and waiting for hidden states.
  int64_t bytes_sent = 0;       ///< All messages to other ranks, those of the driver included.
  // Where replicas divide the experts:
  int64_t sent_rows = 0;           ///< Tokens and outputs of experts sent to other ranks.
  int64_t expert_rows = 0;         ///< Rows that this rank's experts computed, for tokens of any rank.
  double expert_seconds = 0;       ///< Seconds that they took; part of step_seconds - exchange_seconds.
  int64_t splits = 0;              ///< Layers of batches whose tokens were split exactly over replicas.
  double split_seconds = 0;        ///< Seconds spent in exact splits; part of exchange_seconds.
  int64_t busiest_rows = 0;        ///< Sum over these splits of the rows of the busiest rank.
  double mean_rows = 0;            ///< Sum over these splits of the mean rows of a rank.
  int64_t spilled_experts = 0;     ///< Experts of other ranks whose weights this rank received for one batch.
  int64_t spilled_bytes = 0;       ///< Weights that this rank sent for one batch, prefetched ones included.
  int64_t prefetched_experts = 0;  ///< Such experts that it received before their tokens were counted.
  int64_t used_prefetched_experts = 0;  ///< Those of them that got tokens.
  /// Rows of batches that are bound by computation, and the time of this rank's experts for them.
  int64_t timed_rows = 0;
  double timed_seconds = 0;
  /// Bytes of the sent rows and of their routing by level of links, outermost first. The last entry
  /// also has the bytes of all further levels.
  std::array<int64_t, kLinkLevels> level_bytes = {};
  /// Time of computation, step_seconds - exchange_seconds, divided by its mean over all ranks. 1: balanced.
  double imbalance = 1;
};

/// Adds the work of one step, [ranks], and updates `imbalance`.
void AddWork(std::span<const RankStats> step, std::vector<RankStats>* totals);

/// Merges totals of several executors, each of which has the driver and some ranks. The result has one entry
/// for each rank, with `imbalance` over all of them.
std::vector<RankStats> MergeByRank(std::span<const RankStats> parts);

}  // namespace moesaic::engine
