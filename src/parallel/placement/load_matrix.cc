#include "parallel/placement/load_matrix.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace moesaic::parallel {

std::vector<LoadMatrix> Totals(std::span<const Workload> workloads) {
  std::vector<LoadMatrix> totals;
  for (const Workload& workload : workloads) totals.push_back(workload.total);
  return totals;
}

Status CheckLoad(const LoadMatrix& load, const std::string& source) {
  if (load.layers < 1 || load.layers > kMaxLayers)
    return InvalidArgument("{}: layers must be from 1 to {}, found {}", source, kMaxLayers, load.layers);
  if (load.experts < 1 || load.experts > kMaxExperts)
    return InvalidArgument("{}: experts must be from 1 to {}, found {}", source, kMaxExperts, load.experts);
  if (static_cast<int64_t>(load.tokens.size()) != int64_t{load.layers} * load.experts) {
    return InvalidArgument("{}: {} layers of {} experts need {} values, found {}", source, load.layers,
                           load.experts, int64_t{load.layers} * load.experts, load.tokens.size());
  }
  double total = 0;
  for (int layer = 0; layer < load.layers; ++layer) {
    double sum = 0;
    for (int expert = 0; expert < load.experts; ++expert) {
      const double value = load.layer(layer)[expert];
      if (!std::isfinite(value) || value < 0) {
        return InvalidArgument("{}: load of layer {}, expert {} must be finite and not negative, found {}",
                               source, layer, expert, value);
      }
      sum += value;
    }
    if (!std::isfinite(sum))
      return InvalidArgument("{}: sum of layer {} must be finite, found {}", source, layer, sum);
    total += sum;
  }
  if (!(total > 0)) return InvalidArgument("{}: has no tokens: the sum of its loads is {}", source, total);
  return OkStatus();
}

LoadMatrix ScaledLoad(const LoadMatrix& load, double sum) {
  LoadMatrix result = load;
  for (int layer = 0; layer < load.layers; ++layer) {
    const std::span<const double> tokens = load.layer(layer);
    const double total = std::accumulate(tokens.begin(), tokens.end(), 0.0);
    double* row = result.tokens.data() + static_cast<size_t>(layer) * load.experts;
    for (int e = 0; e < load.experts; ++e) row[e] = total > 0 ? row[e] * (sum / total) : sum / load.experts;
  }
  return result;
}

bool HasTokens(const LoadMatrix& load, int layer) {
  const std::span<const double> tokens = load.layer(layer);
  return std::any_of(tokens.begin(), tokens.end(), [](double value) { return value > 0; });
}

LoadMatrix SumOfLoads(std::span<const LoadMatrix> loads) {
  LoadMatrix sum = loads.front();
  for (const LoadMatrix& load : loads.subspan(1)) {
    for (size_t i = 0; i < sum.tokens.size(); ++i) sum.tokens[i] += load.tokens[i];
  }
  return sum;
}

}  // namespace moesaic::parallel
