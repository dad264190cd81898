// Published balancers besides EPLB, as baselines. published_balancers_test.cc compares their plans with
// goldens that the published programs made. Each balancer places every layer independently.
#pragma once

#include <span>
#include <vector>

#include "base/status.h"
#include "parallel/placement/load_matrix.h"
#include "parallel/placement/placement.h"

namespace moesaic::parallel {

/// Static pattern of Huawei's OmniPlacement (omni_pattern_tool/step_1 and step_2): loads become ceil(load /
/// 128) + 3, the hottest experts get the spare slots up to `most_copies` replicas, the largest replicas go to
/// the lightest rank with room first, and ranks are dealt to `hosts` in turn. `redundant_layers` layers with
/// the largest rank load in default order get slots_per_rank slots; the others keep experts / ranks of them.
/// The published tool has one redundant slot per rank; more are a generalisation.
struct OmniOptions {
  int ranks = 0;
  int slots_per_rank = 0;
  int redundant_layers = -1;  ///< -1: all
  int most_copies = 200;
  int hosts = 1;
};
StatusOr<Placement> PlanOmniStatic(const LoadMatrix& load, const OmniOptions& options);

/// FlashLB of vllm-ascend (eplb/core/policy/policy_flashlb.py), of its first plan: groups of experts, hottest
/// first, share the spare replicas so that the mean imbalance over windows is small, and replicas are placed
/// by risk. Experts of equal load are in order, which the published file leaves open. A layer whose replicas
/// cannot be placed keeps vLLM's first placement.
StatusOr<Placement> PlanFlashLb(std::span<const LoadMatrix> windows, int ranks, int slots_per_rank);

/// SwiftBalance of vllm-ascend (policy_swift_balancer.py), from vLLM's first placement: redundant slots get
/// the hottest experts, then the most loaded rank swaps experts with light ones, each pair of ranks once, up
/// to 100 times. Of equally good swaps it takes the first in the order of slots, the published file that of a
/// hash table.
StatusOr<Placement> PlanSwiftBalance(const LoadMatrix& load, int ranks, int slots_per_rank);

/// Edges along which LPLB places second replicas, the same in each group of ranks: rank r holds the i-th
/// hottest expert of rank sources[i % edges][r].
struct LplbGraph {
  std::vector<std::vector<int>> sources = {};  // [edges][ranks of a group]

  static LplbGraph Ring(int ranks);
  static LplbGraph Cube();       ///< 8 ranks, 2 edges
  static LplbGraph Hypercube();  ///< 16 ranks, 2 edges
  static LplbGraph Torus(int rows, int columns);
};

struct LplbOptions {
  int ranks = 0;
  int slots_per_rank = 0;
  LplbGraph graph = {};    ///< empty: a cube, or a ring for an odd number of redundant slots
  int ranks_per_node = 8;  ///< for EPLB, which orders the experts
};

/// Placement of DeepSeek's LPLB (lplb/planner.py): EPLB without redundancy, then second replicas along the
/// edges of a graph. It needs the exact split (TokenSplit), which LPLB computes per batch.
StatusOr<Placement> PlanLplbGraph(const LoadMatrix& load, const LplbOptions& options);

}  // namespace moesaic::parallel
