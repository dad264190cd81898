// AllReduce of short vectors, in which the messages between the children of the root follow no other such
// message.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/collectives/plan_builder.h"
#include "comm/collectives/rank_tree.h"

namespace moesaic::comm {

/// Returns the fractions of the vector that SingleCrossing() sums in the groups of depth 1, 2, ...,
/// Depth(tree).
std::vector<double> SingleCrossingShares(const RankTree& tree);

/// Gives all ranks the sum of [offset, offset + count). Depth D of a tree of D levels has single ranks. Part
/// d of the vector, for d in [1, D], is summed inside the groups of depth d; each rank sends its sums to one
/// rank in each group of depth D + 1 - d, which adds those of all groups; and the results are gathered inside
/// these groups. So parts that wait long for the first sums wait briefly for the results, and the parts use
/// the ports between the children of the root one after the other. All messages of a phase are sent at once.
/// Each part has a stream of its own, as far as there are streams.
void SingleCrossing(PlanBuilder& builder, const RankTree& tree, int64_t offset, int64_t count);

}  // namespace moesaic::comm
