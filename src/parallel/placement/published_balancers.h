// Published balancers besides EPLB, as baselines. Each places one layer for `windows` of loads, of which
// those without a model of windows use the sum. All keep experts of a rank distinct.
#pragma once

#include <span>
#include <vector>

#include "base/status.h"
#include "parallel/placement/load_matrix.h"
#include "parallel/placement/placement.h"

namespace moesaic::parallel {

/// Static pattern of Huawei's OmniPlacement (omni-infer, omni_placement/optim): loads become ceil(load / 128)
/// + 3, the hottest experts get the spare slots up to `most_copies` replicas, the largest replicas go to the
/// lightest rank with room first, and ranks are dealt to `hosts` in turn. `redundant_layers` layers with the
/// largest rank load in default order get slots_per_rank slots; the others keep experts / ranks of them.
struct OmniOptions {
  int ranks = 0;
  int slots_per_rank = 0;
  int redundant_layers = -1;  ///< -1: all
  int most_copies = 200;
  int hosts = 1;
};
StatusOr<Placement> PlanOmniStatic(const LoadMatrix& load, const OmniOptions& options);

/// FlashLB of vllm-ascend (eplb/core/policy/policy_flashlb.py): replica counts by the gain of the maximum per
/// window (compute_piece_counts), then join-the-shortest-queue over windows (jsq_placement), ties in order of
/// experts.
StatusOr<Placement> PlanFlashLb(std::span<const LoadMatrix> windows, int ranks, int slots_per_rank);

/// SwiftBalance of vllm-ascend (policy_swift_balancer.py), from the default order: redundant slots get the
/// hottest experts, then the most and the least loaded rank swap experts, each pair of ranks once, up to 100
/// times, until the imbalance is 1.01.
StatusOr<Placement> PlanSwiftBalance(const LoadMatrix& load, int ranks, int slots_per_rank);

/// Replica graph of DeepSeek's LPLB (lplb/planner.py): EPLB without redundancy, then the hottest experts of
/// each rank get a second replica on neighbours in a hypercube, or at distances of powers of two if the
/// number of ranks is none. It needs the exact split (TokenSplit), which LPLB computes per batch.
StatusOr<Placement> PlanLplbGraph(const LoadMatrix& load, int ranks, int slots_per_rank);

}  // namespace moesaic::parallel
