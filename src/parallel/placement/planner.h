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
  /// Replicas in addition to `slots`, over all layers. Layers whose largest rank load falls most get them:
  /// each at most as many as there are ranks, or twice the mean over layers if that is more.
  int extra_replicas = 0;
  /// Maximum slots of each rank over all layers: its memory, divided by the bytes of an expert. Slots beyond
  /// `slots` go to the layers whose largest rank load falls most, like extra_replicas. Empty: no limit.
  std::vector<int64_t> all_slots = {};
  std::vector<double> speeds = {};  ///< per rank, relative; empty: equal speeds
  /// Placement in use, and the maximum slots of a layer that may get another expert; -1: no limit. Experts
  /// that stay on their rank keep their slots.
  const Placement* current = nullptr;
  int max_moves = -1;
  /// Cost of replicas that are not on the home node of their expert; 0: none. Each node has an equal number
  /// of adjacent ranks, and is the home of an equal number of groups of adjacent experts. Groups are assigned
  /// to nodes so that the loads of nodes are balanced. If all tokens leave their home, the cost is
  /// `traffic_weight` times that of a balanced placement. Costs are a high power of rank loads, so useful
  /// weights are powers of ten. 1e12 keeps all experts at home.
  double traffic_weight = 0;
  int nodes = 1;
  int groups = 1;
  /// Router, for the order of ranks: those with equal speeds and slots are exchanged between the `nodes`, so
  /// that a token is sent to fewer of them (OrderRanks). Null: ranks keep their order. With `current` they
  /// always do, because all experts of exchanged ranks would move; with `cost`, its levels and router
  /// determine the order. Borrowed.
  const Routing* routing = nullptr;
  /// Rates that turn loads into times; borrowed, or null. If set, ranks are balanced by the time of started
  /// tiles and of reading weights. The planner makes plans with several weights of traffic and several
  /// numbers of moves from `current`, and each layer gets the one whose predicted batch (PredictCost) is
  /// fastest. Without `current` ranks are then exchanged between the groups of each level, where that is
  /// predicted to be faster.
  const CostModel* cost = nullptr;
  /// Share of the workloads (or of windows that are given as workloads) that count for a layer's plan. The
  /// others are those with the largest rank loads. 1: all count. Below 1 and without `traffic_weight`, a
  /// layer of `current` changes only if its largest rank load in the workloads that count falls, or with
  /// `cost` its predicted time.
  double quantile = 1;
  int threads = 2;
  int max_steps = 1000;  ///< of the local search, per layer
  /// Called from one thread at a time after each layer.
  std::function<void(int done, int total)> progress = {};
  /// Returns true to end the search: unfinished layers get the best placement so far. Called between steps of
  /// the search, from several threads.
  std::function<bool()> stop = {};
};

struct PlannedPlacement {
  Placement placement;
  bool interrupted = false;
};

/// Plans each layer for all workloads: it minimizes the largest load of a rank over the workloads, not that
/// of their mean. Every workload has equal weight.
///
/// The steps are: replica counts by the highest load of each expert, placement of the largest replicas first,
/// local search by swaps, moves and exchanges of replicas (LayerSearch), and the order of ranks. Ranks hold
/// distinct experts. Slots stay empty only if every rank holds all experts, or if a plan that starts from
/// `current` does not need them.
///
/// The result depends on the arguments except `threads`. InvalidArgument: there are too few slots, or shapes
/// differ.
StatusOr<PlannedPlacement> PlanPlacement(std::span<const LoadMatrix> workloads,
                                         const PlannerOptions& options);

/// Divides `total` slots among `ranks` ranks as evenly as possible; the first ranks get one more.
std::vector<int> EqualSlots(int total, int ranks);

}  // namespace moesaic::parallel
