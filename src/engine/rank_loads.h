// Loads of ranks that follow from the loads of experts and their placement.
#pragma once

#include <memory>
#include <vector>

#include "engine/expert_balancer.h"
#include "engine/expert_load.h"

namespace moesaic::engine {

/// Recent tokens for the experts of each rank, over the mean of all ranks; 1 is balanced. Replicas of an
/// expert have equal shares. Immutable once it is shared.
struct RankLoads {
  std::vector<int> layers = {};       // decoder layers with routed experts and tokens
  int ranks = 0;                      // of an expert group
  std::vector<float> over_mean = {};  // [layers, ranks]
};

/// Layers without recent tokens are left out.
RankLoads RankLoadsOf(const ExpertLoadStats& load, const PlacementByLayer& placement);

}  // namespace moesaic::engine
