// AllReduce of short vectors, in which the messages between the children of the root follow no other such
// message.
#pragma once

#include <cstdint>

#include "comm/collectives/plan_builder.h"
#include "comm/collectives/rank_tree.h"

namespace moesaic::comm {

/// Gives all ranks the sum of [offset, offset + count). Depth D of a tree of D levels has single ranks. Part
/// d of the vector, one of D equal parts, is summed inside the groups of depth d; each rank sends its sums to
/// one rank in each group of depth D + 1 - d, which adds those of all groups; and the results are gathered
/// inside these groups. So parts that wait long for the first sums wait briefly for the results, and the
/// parts use the ports between the children of the root one after the other. All messages of a phase are sent
/// at once. Each part has a stream of its own, as far as there are streams.
void SingleCrossing(PlanBuilder& builder, const RankTree& tree, int64_t offset, int64_t count);

}  // namespace moesaic::comm
