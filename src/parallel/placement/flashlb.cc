// FlashLB: a tree search over replica counts, with a placement by risk (mean plus a multiple of the standard
// deviation).
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "parallel/placement/baseline_slots.h"
#include "parallel/placement/published_balancers.h"

namespace moesaic::parallel {
namespace {

constexpr double kZScore = 0.6744897501960817;  // scipy.stats.norm.ppf(0.75)
constexpr int kDepth = 4, kWidth = 8;
constexpr int kMaxFlashExperts = 4096;  // the covariance of all pairs takes 128 MiB
constexpr int kSamples = 64;            // most windows; older ones are summed

// Windows of one layer [windows][experts] and their statistics.
struct Hotness {
  std::vector<std::vector<double>> windows = {};
  std::vector<double> mean = {}, variance = {}, covariance = {};  // [experts], [experts], [experts, experts]

  int experts() const { return static_cast<int>(mean.size()); }
};

// One token is added to every count, so that no expert is free.
std::vector<std::vector<double>> Samples(std::span<const LoadMatrix> loads, int layer) {
  const int count = static_cast<int>(loads.size()), samples = std::min(count, kSamples);
  const int merged = count / samples, first = count - merged * samples;
  std::vector<std::vector<double>> windows;
  for (int sample = 0; sample < samples; ++sample) {
    std::vector<double>& window = windows.emplace_back(loads.front().experts, 0);
    for (int i = 0; i < merged; ++i) {
      const std::span<const double> tokens = loads[first + sample * merged + i].layer(layer);
      for (size_t e = 0; e < window.size(); ++e) window[e] += tokens[e] + 1;
    }
  }
  return windows;
}

Hotness HotnessOf(std::span<const LoadMatrix> loads, int layer) {
  Hotness hotness{.windows = Samples(loads, layer)};
  const size_t experts = hotness.windows.front().size();
  const auto count = static_cast<double>(hotness.windows.size());
  hotness.mean.assign(experts, 0);
  hotness.variance.assign(experts, 0);
  hotness.covariance.assign(experts * experts, 0);
  for (const std::vector<double>& window : hotness.windows) {
    for (size_t e = 0; e < experts; ++e) hotness.mean[e] += window[e];
  }
  for (double& mean : hotness.mean) mean /= count;
  if (count < 2) return hotness;
  for (const std::vector<double>& window : hotness.windows) {
    for (size_t a = 0; a < experts; ++a) {
      const double deviation = window[a] - hotness.mean[a];
      hotness.variance[a] += deviation * deviation;
      for (size_t b = 0; b < experts; ++b)
        hotness.covariance[a * experts + b] += deviation * (window[b] - hotness.mean[b]);
    }
  }
  for (double& value : hotness.variance) value /= count - 1;
  for (double& value : hotness.covariance) value /= count - 1;
  return hotness;
}

// Replica counts of `experts` after 0, 1, ... `spare` further replicas, each for the largest risk per
// replica.
std::vector<std::vector<int>> CountsBySpare(const Hotness& hotness, std::span<const int> experts, int spare) {
  std::vector<int> counts(experts.size(), 1);
  std::vector<double> risk, unit;
  for (const int e : experts) risk.push_back(hotness.mean[e] + kZScore * std::sqrt(hotness.variance[e]));
  unit = risk;
  std::vector<std::vector<int>> history = {counts};
  for (int i = 0; i < spare; ++i) {
    const auto largest = std::max_element(unit.begin(), unit.end()) - unit.begin();
    unit[largest] = risk[largest] / ++counts[largest];
    history.push_back(counts);
  }
  return history;
}

// Largest replicas first, each on the rank of the least risk. Sums are f32, as in the published file. Returns
// an empty layer if the ranks with room hold an expert already.
LayerPlacement PlaceByRisk(const Hotness& hotness, const std::vector<int>& counts, int ranks, int slots) {
  std::vector<double> unit(counts.size());
  for (size_t e = 0; e < unit.size(); ++e) unit[e] = hotness.mean[e] / counts[e];
  LayerPlacement layer(ranks);
  std::vector<float> mean(ranks, 0), variance(ranks, 0);
  for (const int expert : DescendingOrder(unit)) {
    const double* covariance = hotness.covariance.data() + static_cast<size_t>(expert) * counts.size();
    const double copies = counts[expert];
    for (int copy = 0; copy < counts[expert]; ++copy) {
      int best = -1;
      double least = 1e30, best_mean = 0, best_variance = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        if (static_cast<int>(layer[rank].size()) >= slots || HoldsExpert(layer[rank], expert)) continue;
        const double new_mean = double{mean[rank]} + unit[expert];
        double new_variance = double{variance[rank]} + hotness.variance[expert] / (copies * copies);
        for (const int other : layer[rank]) new_variance += 2 * covariance[other] / copies / counts[other];
        const double risk = new_mean + kZScore * std::sqrt(new_variance);
        if (!(risk < least)) continue;
        least = risk;
        best = rank;
        best_mean = new_mean;
        best_variance = new_variance;
      }
      if (best < 0) return {};
      layer[best].push_back(expert);
      mean[best] = static_cast<float>(best_mean);
      variance[best] = static_cast<float>(best_variance);
    }
  }
  return layer;
}

// Mean over windows of the largest rank load over the mean; f32 as in the published file.
float ScoreOf(const Hotness& hotness, const std::vector<int>& counts, const LayerPlacement& layer) {
  if (layer.empty()) return std::numeric_limits<float>::infinity();
  float sum = 0;
  for (const std::vector<double>& window : hotness.windows) {
    double largest = 0, total = 0;
    for (const std::vector<int>& rank : layer) {
      double load = 0;
      for (const int expert : rank) load += window[expert] / counts[expert];
      total += load;
      largest = std::max(largest, load);
    }
    sum += static_cast<float>((largest * static_cast<double>(layer.size()) + 1e-2) / (total + 1e-2));
  }
  return sum / static_cast<float>(hotness.windows.size());
}

class FlashTree {
 public:
  FlashTree(const Hotness& hotness, int ranks, int slots)
      : hotness_(hotness), ranks_(ranks), slots_(slots), counts_(hotness.experts(), 0) {}

  // Empty if the replicas cannot be placed.
  LayerPlacement Search() {
    const int experts = hotness_.experts();
    int spare = ranks_ * slots_ - experts;
    const int size = (experts + kDepth - 1) / kDepth;  // of a group of experts
    std::vector<double> weight(experts);
    for (int e = 0; e < experts; ++e)
      weight[e] = hotness_.mean[e] + kZScore * std::sqrt(hotness_.variance[e]);
    const std::vector<int> order = DescendingOrder(weight);
    for (int node = 0; node < kDepth - 1; ++node) {
      const std::span<const int> all(order.begin() + std::min(experts, node * size), order.end());
      const std::span<const int> group = all.first(std::min<size_t>(all.size(), size));
      const std::span<const int> rest = all.subspan(group.size());
      if (rest.empty()) return PlaceAll(all, spare);
      const int chosen = ChooseSpare(group, rest, all, spare);
      Set(group, group_counts_[chosen]);
      spare -= chosen;
      if (spare == 0 || node == kDepth - 2) {
        Set(rest, rest_counts_[spare]);
        break;
      }
    }
    return PlaceByRisk(hotness_, counts_, ranks_, slots_);
  }

 private:
  void Set(std::span<const int> experts, const std::vector<int>& counts) {
    for (size_t i = 0; i < experts.size(); ++i) counts_[experts[i]] = counts[i];
  }

  // Fewer experts than the tree has groups.
  LayerPlacement PlaceAll(std::span<const int> experts, int spare) {
    Set(experts, CountsBySpare(hotness_, experts, spare).back());
    return PlaceByRisk(hotness_, counts_, ranks_, slots_);
  }

  // Spare replicas of the group, near the number that it gets if all experts share them.
  int ChooseSpare(std::span<const int> group, std::span<const int> rest, std::span<const int> all,
                  int spare) {
    group_counts_ = CountsBySpare(hotness_, group, spare);
    rest_counts_ = CountsBySpare(hotness_, rest, spare);
    const std::vector<int> shared = CountsBySpare(hotness_, all, spare).back();
    const int initial =
        std::accumulate(shared.begin(), shared.begin() + static_cast<std::ptrdiff_t>(group.size()), 0) -
        static_cast<int>(group.size());
    const auto score = [&](int number) {
      std::vector<int> counts = counts_;
      for (size_t i = 0; i < group.size(); ++i) counts[group[i]] = group_counts_[number][i];
      for (size_t i = 0; i < rest.size(); ++i) counts[rest[i]] = rest_counts_[spare - number][i];
      return ScoreOf(hotness_, counts, PlaceByRisk(hotness_, counts, ranks_, slots_));
    };
    int best = initial;
    float least = score(initial);
    for (int distance = 1; distance <= std::min(std::max(initial, spare - initial), kWidth); ++distance) {
      for (const int number : {initial - distance, initial + distance}) {
        if (number < 0 || number > spare) continue;
        const float value = score(number);
        if (value >= least) continue;
        least = value;
        best = number;
      }
    }
    return best;
  }

  const Hotness& hotness_;
  const int ranks_, slots_;
  std::vector<int> counts_;
  std::vector<std::vector<int>> group_counts_, rest_counts_;
};

}  // namespace

StatusOr<Placement> PlanFlashLb(std::span<const LoadMatrix> windows, int ranks, int slots_per_rank) {
  if (windows.empty()) return InvalidArgument("FlashLB needs a window of loads");
  RETURN_IF_ERROR(CheckBaselineSlots(windows.front(), ranks, slots_per_rank));
  if (windows.front().experts > kMaxFlashExperts)
    return InvalidArgument("FlashLB compares all pairs of experts, which must be at most {}, found {}",
                           kMaxFlashExperts, windows.front().experts);
  Placement placement{.experts = windows.front().experts};
  for (int layer = 0; layer < windows.front().layers; ++layer) {
    LayerPlacement found = FlashTree(HotnessOf(windows, layer), ranks, slots_per_rank).Search();
    if (found.empty()) found = StartOfVllm(placement.experts, ranks, slots_per_rank);
    placement.layers.push_back(std::move(found));
  }
  return placement;
}

}  // namespace moesaic::parallel
