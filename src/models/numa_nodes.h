// Over which NUMA nodes a model's weights lie, and how.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "models/model.h"
#include "models/weight_plan.h"
#include "runtime/topology.h"

namespace moesaic::models {

/// How weights are to lie: any policy but kAuto, and the system's numbers of the nodes, none for kLocal.
struct NumaPlacement {
  NumaPolicy policy = NumaPolicy::kLocal;
  std::vector<int> nodes;

  /// Images of the weights, or of parts of them, in memory: one a node if they are mirrored or sliced.
  int images() const;
};

/// Whether each node has an image of its own: kMirror and kSlice.
bool IsByNode(NumaPolicy policy);
/// "mirrored" or "sliced".
const char* Participle(NumaPolicy by_node);

/// Those of `nodes`, which the process may run on, that weights are interleaved over; none: they lie where
/// the thread runs that first writes them. kAuto does without where the system refuses, as many containers do
/// (mbind needs a capability there), and logs why; with kInterleave, loading fails then.
std::vector<int> NodesToInterleave(std::vector<int> nodes, NumaPolicy policy);

/// What `policy` comes to for the weights of `plan` on this machine and the nodes of `pool`'s threads.
/// Logs where there is nothing to mirror or slice. ResourceExhausted as CheckNodeMemory says.
StatusOr<NumaPlacement> PlaceWeights(NumaPolicy policy, const WeightPlan& plan,
                                     const runtime::ThreadPool& pool);

/// Fails when images of `image_bytes` bytes each take more than the `available` bytes (0: unknown), or one
/// more than its node has.
Status CheckNodeMemory(const NumaPlacement& placement, int64_t image_bytes, int64_t available,
                       std::span<const runtime::NumaNode> nodes);

}  // namespace moesaic::models
