#include "engine/rank_loads.h"

#include <algorithm>
#include <numeric>

#include "parallel/placement/balance.h"

namespace moesaic::engine {

RankLoads RankLoadsOf(const ExpertLoadStats& load, const PlacementByLayer& placement) {
  RankLoads result;
  const auto experts = static_cast<size_t>(load.experts);
  for (size_t i = 0; i < load.layers.size(); ++i) {
    const std::span<const double> tokens(load.recent.data() + i * experts, experts);
    const double total = std::accumulate(tokens.begin(), tokens.end(), 0.0);
    const auto placed = placement.find(load.layers[i]);
    if (!(total > 0) || placed == placement.end()) continue;
    const std::vector<double> loads = parallel::EqualShareLoads(placed->second, tokens);
    result.layers.push_back(load.layers[i]);
    result.ranks = static_cast<int>(loads.size());
    for (const double rank : loads)
      result.over_mean.push_back(static_cast<float>(rank * static_cast<double>(loads.size()) / total));
  }
  return result;
}

}  // namespace moesaic::engine
