// Over which NUMA nodes a model's weights lie in turn.
#pragma once

#include <vector>

#include "models/model.h"

namespace moesaic::models {

/// Those of `nodes`, which the process may run on, that weights are interleaved over; none: they lie where
/// the thread runs that first writes them. kAuto does without where the system refuses, as many containers do
/// (mbind needs a capability there), and logs why; with kInterleave, loading fails then.
std::vector<int> NodesToInterleave(std::vector<int> nodes, NumaPolicy policy);

}  // namespace moesaic::models
