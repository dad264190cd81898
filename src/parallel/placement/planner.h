// Plans placements that stay balanced when the workload changes.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "parallel/placement/layer_cost.h"
#include "parallel/placement/load_matrix.h"
#include "parallel/placement/placement.h"

namespace moesaic::parallel {

struct PlannerOptions {
  std::vector<int> slots = {};  ///< per rank; unequal numbers are allowed
  /// Further replicas over all layers, on top of `slots`: each layer gets up to one per rank, where they
  /// lower the largest rank load most.
  int extra_replicas = 0;
  /// Most slots of each rank over all layers: its memory, divided by the bytes of an expert. Slots beyond
  /// those of `slots` are given to the layers where they help most, as those of extra_replicas. Empty: no
  /// limit.
  std::vector<int64_t> all_slots = {};
  std::vector<double> speeds = {};  ///< per rank, relative; empty: equal speeds
  /// Placement in use and the most slots of a layer that may get another expert; -1: any number. Experts that
  /// stay on their rank keep their slots.
  const Placement* current = nullptr;
  int max_moves = -1;
  /// Cost of replicas that are not on the home node of their expert; 0: none. Each node has an equal number
  /// of adjacent ranks, and of groups of adjacent experts, whose home it is; groups are assigned so that the
  /// loads of nodes are balanced. If all tokens leave their home, the cost is `traffic_weight` times that of
  /// a balanced placement. Costs are a high power of rank loads, so useful weights are powers of ten. 1e12
  /// keeps all experts at home.
  double traffic_weight = 0;
  int nodes = 1;
  int groups = 1;
  /// Rates that turn loads into times. Ranks are then balanced by the time of started tiles and of reading
  /// weights; plans with several weights of traffic, and several numbers of moves from `current`, are made,
  /// and each layer gets the one whose predicted batch (PredictCost) is fastest. Borrowed.
  const CostModel* cost = nullptr;
  /// Share of the workloads, or of windows that are given as workloads, that a layer's plan is for: those
  /// whose largest rank load is smallest. 1: all.
  double quantile = 1;
  int threads = 2;
  int max_steps = 1000;  ///< of the local search, per layer
  /// Called from one thread at a time after each layer.
  std::function<void(int done, int total)> progress = {};
  /// True ends the search: layers that are not done get the placement found so far. Called between steps of
  /// the search from several threads.
  std::function<bool()> stop = {};
};

struct PlannedPlacement {
  Placement placement;
  bool interrupted = false;
};

/// Plans each layer for all workloads at once: the largest load of a rank is minimal over workloads, not that
/// of their mean. Steps: replica counts by the highest load of each expert, placement of the largest replicas
/// first, then local search by swaps, moves and exchanges of replicas (LayerSearch). Every workload has equal
/// weight. Ranks hold distinct experts; slots stay empty only where every rank holds all experts, or
/// where a plan that starts from `current` has no use for them. The result
/// depends on the arguments only, not on `threads`. InvalidArgument for too few slots or shapes that differ.
StatusOr<PlannedPlacement> PlanPlacement(std::span<const LoadMatrix> workloads,
                                         const PlannerOptions& options);

/// `total` slots on `ranks` ranks, as equally as possible; the first ranks get one more.
std::vector<int> EqualSlots(int total, int ranks);

}  // namespace moesaic::parallel
