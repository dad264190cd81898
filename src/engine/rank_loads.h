// Computes the loads of ranks from the loads of experts and their placement.
#pragma once

#include <memory>
#include <vector>

#include "engine/expert_balancer.h"
#include "engine/expert_load.h"

namespace moesaic::engine {

/// Recent tokens of each rank's experts, divided by the mean over all ranks; 1: balanced. Replicas of an
/// expert count equal shares of its tokens. Immutable once it is shared.
struct RankLoads {
  std::vector<int> layers = {};       // decoder layers with routed experts and tokens
  int ranks = 0;                      // of an expert group
  std::vector<float> over_mean = {};  // [layers, ranks]
};

/// Returns the loads of all layers with recent tokens.
RankLoads RankLoadsOf(const ExpertLoadStats& load, const PlacementByLayer& placement);

}  // namespace moesaic::engine
