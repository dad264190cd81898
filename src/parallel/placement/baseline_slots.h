// Parts that several published balancers share.
#pragma once

#include <span>
#include <vector>

#include "base/status.h"
#include "parallel/placement/load_matrix.h"
#include "parallel/placement/placement.h"

namespace moesaic::parallel {

bool HoldsExpert(const std::vector<int>& rank, int expert);

/// Indices by descending value; ties in order of indices.
std::vector<int> DescendingOrder(std::span<const double> values);

/// InvalidArgument unless the slots hold all experts, and a rank has at most one slot per expert.
Status CheckBaselineSlots(const LoadMatrix& load, int ranks, int slots_per_rank);

/// The placement that vLLM and vllm-ascend start from: all experts in order, then further replicas of the
/// first ones, on consecutive slots.
LayerPlacement StartOfVllm(int experts, int ranks, int slots_per_rank);

}  // namespace moesaic::parallel
