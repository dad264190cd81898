// Temporary replicas for one batch: experts of overloaded ranks are prefetched by ranks with room.
#pragma once

#include <span>
#include <vector>

#include "parallel/placement/token_split.h"

namespace moesaic::parallel {

struct SpillOptions {
  int max_moves = 0;       ///< expert weights that may move in this layer
  int prefetch_slots = 2;  ///< temporary replicas a rank may hold
  /// [ranks] Temporary replicas that ranks hold already, which are part of the split. Borrowed; empty: none.
  std::span<const int> held = {};
  double tolerance = 0;      ///< accepted excess of the largest load / speed over the mean, relative
  int64_t expert_bytes = 0;  ///< weights of an expert; 0: no limit by bytes
  int64_t max_bytes = 0;     ///< bytes that may move in this layer; only with expert_bytes
};

struct SpillMove {
  int expert = 0, from = 0, to = 0;  ///< `from` is the overloaded rank that holds the weights
};

struct SpillPlan {
  std::vector<SpillMove> moves = {};
  double before = 0, after = 0;  ///< largest load / speed with the exact split
};

/// Plans the moves of a batch. Bisection finds the smallest threshold that max_moves reach; per threshold,
/// the rank with the largest excess passes on the largest possible load first. `tolerance` ends it early, so
/// that fewer experts move. Deterministic. Replicas of the moves are added to `split`, which holds the split
/// of the result.
SpillPlan PlanSpill(TokenSplit& split, std::span<const double> loads, const SpillOptions& options);

}  // namespace moesaic::parallel
