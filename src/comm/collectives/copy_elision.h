// Removal of copies of the input from plans.
#pragma once

#include "comm/collectives/plan.h"

namespace moesaic::comm {

/// Algorithms are written as if the input were first copied to a work buffer. This pass sends unchanged
/// ranges from the input itself, lets the first sum into a range take the input as its other operand, and
/// copies only ranges that are used otherwise, as late as possible. The plan computes the same.
void ElideCopies(RankPlan* plan);

}  // namespace moesaic::comm
