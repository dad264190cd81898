// OmniPlacement's static pattern.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <queue>

#include "parallel/placement/balance.h"
#include "parallel/placement/baseline_slots.h"
#include "parallel/placement/published_balancers.h"

namespace moesaic::parallel {
namespace {

// Tokens of a row of the recorder, and the smoothing that keeps cold experts from being free.
constexpr double kRow = 128, kSmoothing = 3;

// Each further replica goes to the largest load per replica; of equal ones to the smallest load, then to the
// first expert.
std::vector<int> OmniCounts(std::span<const double> loads, int spare, int most) {
  struct Entry {
    double share, load;
    int expert;
    bool operator<(const Entry& other) const {
      if (share != other.share) return share < other.share;
      return load != other.load ? load > other.load : expert > other.expert;
    }
  };
  std::vector<int> copies(loads.size(), 1);
  std::priority_queue<Entry> queue;
  for (int e = 0; e < static_cast<int>(loads.size()) && most > 1; ++e) queue.push({loads[e], loads[e], e});
  for (; spare > 0 && !queue.empty(); --spare) {
    const Entry top = queue.top();
    queue.pop();
    const int count = ++copies[top.expert];
    if (count < most) queue.push({top.load / count, top.load, top.expert});
  }
  return copies;
}

// Largest replicas first, each on the lightest rank that has room and lacks the expert. Where the published
// file ends in an error because no rank is left, the expert of a lighter replica moves out of the way.
LayerPlacement LongestFirst(std::span<const double> loads, const std::vector<int>& copies, int ranks,
                            int slots) {
  std::vector<double> share(loads.begin(), loads.end()), rank_load(ranks, 0);
  for (size_t e = 0; e < share.size(); ++e) share[e] /= copies[e];
  LayerPlacement layer(ranks);
  const auto has_room = [&](int rank) { return static_cast<int>(layer[rank].size()) < slots; };
  for (const int expert : DescendingOrder(share)) {
    for (int copy = 0; copy < copies[expert]; ++copy) {
      int best = -1;
      for (int rank = 0; rank < ranks; ++rank) {
        if (!has_room(rank) || HoldsExpert(layer[rank], expert)) continue;
        if (best < 0 || rank_load[rank] < rank_load[best]) best = rank;
      }
      if (best >= 0) {
        layer[best].push_back(expert);
        rank_load[best] += share[expert];
        continue;
      }
      for (int open = 0; open < ranks && best < 0; ++open) {
        for (int rank = 0; has_room(open) && rank < ranks && best < 0; ++rank) {
          if (HoldsExpert(layer[rank], expert)) continue;
          for (int& other : layer[rank]) {
            if (HoldsExpert(layer[open], other)) continue;
            layer[open].push_back(other);
            rank_load[open] += share[other];
            rank_load[rank] += share[expert] - share[other];
            other = expert;
            best = rank;
            break;
          }
        }
      }
    }
  }
  return layer;
}

// Layers by their largest rank load in the default order, hottest first; of equal ones the last, as with
// NumPy's sort of few values.
std::vector<int> HottestLayers(const std::vector<std::vector<double>>& loads, int experts, int ranks) {
  std::vector<double> worst;
  for (const std::vector<double>& layer : loads) {
    const std::vector<double> sums = EqualShareLoads(InOrder(experts, ranks), layer);
    worst.push_back(*std::max_element(sums.begin(), sums.end()));
  }
  std::reverse(worst.begin(), worst.end());
  std::vector<int> order = DescendingOrder(worst);
  for (int& layer : order) layer = static_cast<int>(worst.size()) - 1 - layer;
  return order;
}

}  // namespace

StatusOr<Placement> PlanOmniStatic(const LoadMatrix& load, const OmniOptions& options) {
  RETURN_IF_ERROR(CheckBaselineSlots(load, options.ranks, options.slots_per_rank));
  if (options.hosts < 1 || options.ranks % options.hosts != 0)
    return InvalidArgument("nodes (hosts) must divide the {} ranks, found {}", options.ranks, options.hosts);
  std::vector<std::vector<double>> loads(load.layers);
  for (int layer = 0; layer < load.layers; ++layer) {
    for (const double tokens : load.layer(layer))
      loads[layer].push_back(std::ceil(tokens / kRow) + kSmoothing);
  }
  const int bare = (load.experts + options.ranks - 1) / options.ranks;
  std::vector<char> redundant(load.layers, options.redundant_layers < 0 ? 1 : 0);
  const std::vector<int> hottest = HottestLayers(loads, load.experts, options.ranks);
  for (int i = 0; i < std::min(options.redundant_layers, load.layers); ++i) redundant[hottest[i]] = 1;
  Placement placement{.experts = load.experts};
  for (int layer = 0; layer < load.layers; ++layer) {
    const int slots = redundant[layer] ? options.slots_per_rank : bare;
    const std::vector<int> copies = OmniCounts(loads[layer], slots * options.ranks - load.experts,
                                               std::min(options.most_copies, options.ranks));
    const int replicas = std::accumulate(copies.begin(), copies.end(), 0);  // fewer if most_copies is small
    const LayerPlacement placed =
        LongestFirst(loads[layer], copies, options.ranks, (replicas + options.ranks - 1) / options.ranks);
    // Rank i of the packing becomes the (i / hosts)-th rank of host i % hosts.
    LayerPlacement dealt(options.ranks);
    const int per_host = options.ranks / options.hosts;
    for (int i = 0; i < options.ranks; ++i)
      dealt[i % options.hosts * per_host + i / options.hosts] = placed[i];
    placement.layers.push_back(std::move(dealt));
  }
  return placement;
}

}  // namespace moesaic::parallel
