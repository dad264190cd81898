// Chooses the NUMA nodes that hold a model's weights, and the placement on them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "models/model.h"
#include "models/weight_plan.h"
#include "runtime/topology.h"

namespace moesaic::models {

/// Placement of weights: any policy but kAuto, and the operating system's node numbers; empty for kLocal.
struct NumaPlacement {
  NumaPolicy policy = NumaPolicy::kLocal;
  std::vector<int> nodes;

  /// Returns the number of images of the weights, or of parts of them: one per node if mirrored or sliced,
  /// otherwise 1.
  int images() const;
};

/// Returns whether each node has its own image: kMirror and kSlice.
bool IsByNode(NumaPolicy policy);
/// "mirrored" or "sliced".
const char* ToString(NumaPolicy by_node);

/// Returns the subset of `nodes` (on which the process may run) to interleave weights over; empty: the thread
/// that first writes a page places it. If the system refuses (mbind needs a capability in many containers),
/// kAuto logs the reason and does not interleave; with kInterleave, loading fails later.
std::vector<int> NodesToInterleave(std::vector<int> nodes, NumaPolicy policy);

/// Resolves `policy` for the weights of `plan` on this machine and the nodes of `pool`'s threads. Logs if
/// there is nothing to mirror or slice. Returns ResourceExhausted under the conditions of CheckNodeMemory.
StatusOr<NumaPlacement> PlaceWeights(NumaPolicy policy, const WeightPlan& plan,
                                     const runtime::ThreadPool& pool);

/// Returns ResourceExhausted if images of `image_bytes` bytes each need more than the `available` bytes (0:
/// unknown), or one image more than its node has.
Status CheckNodeMemory(const NumaPlacement& placement, int64_t image_bytes, int64_t available,
                       std::span<const runtime::NumaNode> nodes);

}  // namespace moesaic::models
