// Proof of a plan by symbolic execution.
#pragma once

#include "base/status.h"
#include "comm/collectives/plan.h"

namespace moesaic::comm {

/// Proves that a plan computes its collective and cannot deadlock:
///   - every slice is inside its buffer, and no step writes to the input;
///   - slices that a round receives are disjoint from each other and from those it sends;
///   - each send matches a receive of equal count and encoding;
///   - streams of a rank do not race: a range that one writes is used by no other;
///   - rounds cannot wait for each other in a cycle, even where a send ends only after its receive has
///   started;
///   - each output element is the sum of exactly the contributions of the collective, each once. The end of a
///     barrier on any rank follows its start on all ranks.
/// InvalidArgument names the rank, stream and round. The cost does not depend on the number of elements.
Status CheckPlan(const Plan& plan);

}  // namespace moesaic::comm
