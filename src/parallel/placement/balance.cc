#include "parallel/placement/balance.h"

#include <algorithm>
#include <numeric>

#include "parallel/placement/spill.h"
#include "parallel/placement/token_split.h"

namespace moesaic::parallel {
namespace {

double OverMean(double worst, std::span<const double> loads, size_t ranks, std::span<const double> speeds) {
  const double speed =
      speeds.empty() ? static_cast<double>(ranks) : std::accumulate(speeds.begin(), speeds.end(), 0.0);
  const double total = std::accumulate(loads.begin(), loads.end(), 0.0);
  return total > 0 ? worst * speed / total : 1;
}

}  // namespace

std::vector<double> EqualShareLoads(const LayerPlacement& layer, std::span<const double> loads) {
  const std::vector<int> copies = CopiesOf(layer, static_cast<int>(loads.size()));
  std::vector<double> sums;
  for (const std::vector<int>& rank : layer) {
    double sum = 0;
    for (const int expert : rank) sum += loads[expert] / copies[expert];
    sums.push_back(sum);
  }
  return sums;
}

double Imbalance(const LayerPlacement& layer, std::span<const double> loads, std::span<const double> speeds) {
  std::vector<double> rank_loads = EqualShareLoads(layer, loads);
  for (size_t rank = 0; rank < speeds.size(); ++rank) rank_loads[rank] /= speeds[rank];
  return OverMean(*std::max_element(rank_loads.begin(), rank_loads.end()), loads, layer.size(), speeds);
}

double SplitImbalance(const LayerPlacement& layer, std::span<const double> loads,
                      std::span<const double> speeds) {
  TokenSplit split(layer, static_cast<int>(loads.size()), speeds);
  return OverMean(split.Solve(loads), loads, layer.size(), speeds);
}

double SpillImbalance(const LayerPlacement& layer, std::span<const double> loads, int moves, int& moved,
                      std::span<const double> speeds) {
  TokenSplit split(layer, static_cast<int>(loads.size()), speeds);
  const SpillPlan plan = PlanSpill(split, loads, {.max_moves = moves});
  moved = static_cast<int>(plan.moves.size());
  return OverMean(plan.after, loads, layer.size(), speeds);
}

int ActivatedExperts(const LayerPlacement& layer, std::span<const double> loads) {
  // The split of unit loads is whole: every expert has one replica with its token.
  std::vector<int64_t> units;
  for (const double load : loads) units.push_back(load > 0 ? 1 : 0);
  TokenSplit split(layer, static_cast<int>(loads.size()));
  int64_t most = 0;
  for (const std::vector<int64_t>& rank : split.SplitTokens(units))
    most = std::max(most, std::accumulate(rank.begin(), rank.end(), int64_t{0}));
  return static_cast<int>(most);
}

}  // namespace moesaic::parallel
