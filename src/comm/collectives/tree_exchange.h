// Collectives on a vector whose ranges are owned by ranks of a tree: each level runs the exchange of
// level_exchange.h on all ranks at once, so the ports of a group work as parallel rails.
#pragma once

#include "comm/collectives/level_exchange.h"
#include "comm/collectives/plan_builder.h"
#include "comm/collectives/plan_factory.h"
#include "comm/collectives/rank_tree.h"

namespace moesaic::comm {

/// Each function adds messages from `step` on and returns the step after the last message.

/// Gives each owner the sum of its ranges. Inner levels come first.
int TreeReduceScatter(PlanBuilder& builder, int step, const RankTree& tree, const Ownership& owner,
                      const WorkBuffer& work, const PlanShape& shape);
/// Gives all ranks the contents of each range's owner. The topmost level comes first.
int TreeAllGather(PlanBuilder& builder, int step, const RankTree& tree, const Ownership& owner,
                  const WorkBuffer& work, const PlanShape& shape);
/// Gives all ranks the sum of [offset, offset + count).
int TreeAllReduce(PlanBuilder& builder, int step, const RankTree& tree, int64_t offset, int64_t count,
                  const WorkBuffer& work, const PlanShape& shape);
/// Gives all ranks the root's contents of [offset, offset + count).
int TreeBroadcast(PlanBuilder& builder, int step, const RankTree& tree, int root, int64_t offset,
                  int64_t count, const WorkBuffer& work, const PlanShape& shape);
/// No rank passes the returned step before all have reached `step`.
int TreeBarrier(PlanBuilder& builder, int step, const RankTree& tree);

}  // namespace moesaic::comm
