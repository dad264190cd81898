#include "parallel/placement/published_balancers.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "parallel/placement/balance.h"

namespace moesaic::parallel {
namespace {

bool Contains(const std::vector<int>& rank, int expert) {
  return std::find(rank.begin(), rank.end(), expert) != rank.end();
}

std::vector<int> Descending(std::span<const double> values) {
  std::vector<int> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return values[a] > values[b]; });
  return order;
}

Status CheckSlots(const LoadMatrix& load, int ranks, int slots_per_rank) {
  if (ranks < 1 || ranks > kMaxRanks)
    return InvalidArgument("ranks must be from 1 to {}, found {}", kMaxRanks, ranks);
  if (slots_per_rank < 1 || slots_per_rank > load.experts)
    return InvalidArgument("slots of a rank must be from 1 to the {} experts, found {}", load.experts,
                           slots_per_rank);
  if (int64_t{ranks} * slots_per_rank < load.experts)
    return InvalidArgument("slots must hold the {} experts, found {}", load.experts,
                           int64_t{ranks} * slots_per_rank);
  return OkStatus();
}

// Replica counts: the hottest expert per replica gets the next one.
std::vector<int> GreedyCopies(std::span<const double> loads, int total, int most) {
  const int experts = static_cast<int>(loads.size());
  std::vector<int> copies(experts, 1);
  for (int i = experts; i < total; ++i) {
    int best = -1;
    for (int e = 0; e < experts; ++e) {
      if (copies[e] < most && (best < 0 || loads[e] / copies[e] > loads[best] / copies[best])) best = e;
    }
    if (best < 0) break;
    ++copies[best];
  }
  return copies;
}

// Slots that distinctness left empty get the hottest experts that the rank lacks; experts without a replica
// first.
void FillSlots(LayerPlacement& layer, std::span<const double> loads, int slots) {
  const int experts = static_cast<int>(loads.size());
  std::vector<int> copies = CopiesOf(layer, experts);
  for (int expert = 0; expert < experts; ++expert) {
    if (copies[expert] > 0) continue;
    const auto open = std::find_if(layer.begin(), layer.end(), [&](const std::vector<int>& rank) {
      return static_cast<int>(rank.size()) < slots;
    });
    if (open == layer.end()) continue;
    open->push_back(expert);
    ++copies[expert];
  }
  for (std::vector<int>& rank : layer) {
    while (static_cast<int>(rank.size()) < slots) {
      int best = -1;
      for (int e = 0; e < experts; ++e) {
        if (Contains(rank, e)) continue;
        if (best < 0 || loads[e] / copies[e] > loads[best] / copies[best]) best = e;
      }
      if (best < 0) return;
      rank.push_back(best);
      ++copies[best];
    }
  }
}

// Largest replicas first, each on the lightest rank that has room and lacks the expert.
LayerPlacement LongestFirst(std::span<const double> loads, const std::vector<int>& copies, int ranks,
                            int slots) {
  std::vector<double> share(loads.begin(), loads.end()), rank_load(ranks, 0);
  for (size_t e = 0; e < share.size(); ++e) share[e] /= copies[e];
  LayerPlacement layer(ranks);
  for (const int expert : Descending(share)) {
    for (int copy = 0; copy < copies[expert]; ++copy) {
      int best = -1;
      for (int rank = 0; rank < ranks; ++rank) {
        if (static_cast<int>(layer[rank].size()) >= slots || Contains(layer[rank], expert)) continue;
        if (best < 0 || rank_load[rank] < rank_load[best]) best = rank;
      }
      if (best < 0) break;
      layer[best].push_back(expert);
      rank_load[best] += share[expert];
    }
  }
  FillSlots(layer, loads, slots);
  return layer;
}

// FlashLB's compute_piece_counts.
std::vector<int> PieceCounts(const std::vector<std::vector<double>>& windows, int total) {
  const int experts = static_cast<int>(windows.front().size());
  std::vector<int> pieces(experts, 1);
  std::vector<double> gains(experts);
  for (int spare = total - experts; spare > 0; --spare) {
    std::fill(gains.begin(), gains.end(), 0.0);
    for (const std::vector<double>& window : windows) {
      int first = -1;
      double largest = -1, second = -1;
      for (int e = 0; e < experts; ++e) {
        const double unit = window[e] / pieces[e];
        if (unit > largest) {
          second = largest;
          largest = unit;
          first = e;
        } else if (unit > second) {
          second = unit;
        }
      }
      const double gain = largest - std::max(window[first] / (pieces[first] + 1), second);
      gains[first] += gain != 0 ? gain : 1;
    }
    ++pieces[std::max_element(gains.begin(), gains.end()) - gains.begin()];
  }
  return pieces;
}

// FlashLB's jsq_placement with equal weights of windows.
LayerPlacement JoinShortestQueue(const std::vector<std::vector<double>>& windows,
                                 const std::vector<int>& pieces, int ranks, int slots) {
  const int experts = static_cast<int>(pieces.size());
  std::vector<double> score(experts, 0);
  for (const std::vector<double>& window : windows) {
    for (int e = 0; e < experts; ++e) score[e] += window[e] / pieces[e];
  }
  std::vector<std::vector<double>> load(windows.size(), std::vector<double>(ranks, 0));
  LayerPlacement layer(ranks);
  for (const int expert : Descending(score)) {
    for (int piece = 0; piece < pieces[expert]; ++piece) {
      int best = -1;
      double least = 1e30;
      std::vector<double> costs(ranks, 0);
      for (size_t w = 0; w < windows.size(); ++w) {
        const double unit = windows[w][expert] / pieces[expert];
        const double most = *std::max_element(load[w].begin(), load[w].end());
        const double mean = std::accumulate(load[w].begin(), load[w].end(), 0.0) / ranks + unit + 1e-2;
        for (int rank = 0; rank < ranks; ++rank) costs[rank] += std::max(load[w][rank] + unit, most) / mean;
      }
      for (int rank = 0; rank < ranks; ++rank) {
        if (static_cast<int>(layer[rank].size()) >= slots || Contains(layer[rank], expert)) continue;
        if (costs[rank] < least) {
          least = costs[rank];
          best = rank;
        }
      }
      if (best < 0) break;
      layer[best].push_back(expert);
      for (size_t w = 0; w < windows.size(); ++w) load[w][best] += windows[w][expert] / pieces[expert];
    }
  }
  FillSlots(layer, score, slots);
  return layer;
}

constexpr double kSwiftThreshold = 1.01;
constexpr int kSwiftSwaps = 100;

void SwapExtremes(LayerPlacement& layer, std::span<const double> loads) {
  const int ranks = static_cast<int>(layer.size());
  const std::vector<int> copies = CopiesOf(layer, static_cast<int>(loads.size()));
  std::vector<double> rank_load = EqualShareLoads(layer, loads);
  std::vector<std::vector<char>> met(ranks, std::vector<char>(ranks, 0));
  const double mean = std::accumulate(rank_load.begin(), rank_load.end(), 0.0) / ranks;
  for (int swap = 0; swap < kSwiftSwaps; ++swap) {
    const std::vector<int> order = Descending(rank_load);
    const int high = order.front();
    if (rank_load[high] <= kSwiftThreshold * mean) return;
    // The lightest rank that the heaviest one hasn't met, and the swap that leaves their larger load
    // smallest.
    bool swapped = false;
    for (auto low = order.rbegin(); low != order.rend() && *low != high && !swapped; ++low) {
      if (met[high][*low]) continue;
      double best = rank_load[high] - 0.01 * mean;
      int best_a = -1, best_b = -1;
      for (int a = 0; a < static_cast<int>(layer[high].size()); ++a) {
        for (int b = 0; b < static_cast<int>(layer[*low].size()); ++b) {
          const int mine = layer[high][a], theirs = layer[*low][b];
          if (Contains(layer[*low], mine) || Contains(layer[high], theirs)) continue;
          const double shift = loads[mine] / copies[mine] - loads[theirs] / copies[theirs];
          const double larger = std::max(rank_load[high] - shift, rank_load[*low] + shift);
          if (larger >= best) continue;
          best = larger;
          best_a = a;
          best_b = b;
        }
      }
      if (best_a < 0) continue;
      const int mine = layer[high][best_a], theirs = layer[*low][best_b];
      const double shift = loads[mine] / copies[mine] - loads[theirs] / copies[theirs];
      rank_load[high] -= shift;
      rank_load[*low] += shift;
      std::swap(layer[high][best_a], layer[*low][best_b]);
      met[high][*low] = met[*low][high] = 1;
      swapped = true;
    }
    if (!swapped) return;
  }
}

std::vector<int> HottestLayers(const LoadMatrix& load, int ranks) {
  std::vector<double> worst;
  for (int layer = 0; layer < load.layers; ++layer) {
    const std::vector<double> loads = EqualShareLoads(InOrder(load.experts, ranks), load.layer(layer));
    worst.push_back(*std::max_element(loads.begin(), loads.end()));
  }
  return Descending(worst);
}

}  // namespace

StatusOr<Placement> PlanOmniStatic(const LoadMatrix& load, const OmniOptions& options) {
  RETURN_IF_ERROR(CheckSlots(load, options.ranks, options.slots_per_rank));
  if (options.hosts < 1 || options.ranks % options.hosts != 0)
    return InvalidArgument("hosts must divide the {} ranks, found {}", options.ranks, options.hosts);
  const int bare = (load.experts + options.ranks - 1) / options.ranks;
  std::vector<char> redundant(load.layers, options.redundant_layers < 0 ? 1 : 0);
  const std::vector<int> hottest = HottestLayers(load, options.ranks);
  for (int i = 0; i < std::min(options.redundant_layers, load.layers); ++i) redundant[hottest[i]] = 1;
  Placement placement{.experts = load.experts};
  for (int layer = 0; layer < load.layers; ++layer) {
    std::vector<double> loads;
    for (const double tokens : load.layer(layer)) loads.push_back(std::ceil(tokens / 128) + 3);
    const int slots = redundant[layer] ? options.slots_per_rank : bare;
    const auto copies =
        GreedyCopies(loads, slots * options.ranks, std::min(options.most_copies, options.ranks));
    const LayerPlacement placed = LongestFirst(loads, copies, options.ranks, slots);
    // Rank i of the packing becomes the (i / hosts)-th rank of host i % hosts.
    LayerPlacement dealt(options.ranks);
    const int per_host = options.ranks / options.hosts;
    for (int i = 0; i < options.ranks; ++i)
      dealt[i % options.hosts * per_host + i / options.hosts] = placed[i];
    placement.layers.push_back(std::move(dealt));
  }
  return placement;
}

StatusOr<Placement> PlanFlashLb(std::span<const LoadMatrix> windows, int ranks, int slots_per_rank) {
  if (windows.empty()) return InvalidArgument("FlashLB needs a window of loads");
  RETURN_IF_ERROR(CheckSlots(windows.front(), ranks, slots_per_rank));
  Placement placement{.experts = windows.front().experts};
  for (int layer = 0; layer < windows.front().layers; ++layer) {
    std::vector<std::vector<double>> loads;
    for (const LoadMatrix& window : windows) {
      const std::span<const double> tokens = window.layer(layer);
      loads.emplace_back(tokens.begin(), tokens.end());
    }
    const std::vector<int> pieces = PieceCounts(loads, ranks * slots_per_rank);
    placement.layers.push_back(JoinShortestQueue(loads, pieces, ranks, slots_per_rank));
  }
  return placement;
}

StatusOr<Placement> PlanSwiftBalance(const LoadMatrix& load, int ranks, int slots_per_rank) {
  RETURN_IF_ERROR(CheckSlots(load, ranks, slots_per_rank));
  Placement placement{.experts = load.experts};
  for (int layer = 0; layer < load.layers; ++layer) {
    const std::span<const double> tokens = load.layer(layer);
    LayerPlacement placed = InOrder(load.experts, ranks);
    std::vector<int> copies = GreedyCopies(tokens, ranks * slots_per_rank, ranks);
    std::vector<double> share(tokens.begin(), tokens.end());
    for (int e = 0; e < load.experts; ++e) share[e] /= copies[e];
    std::vector<double> rank_load(ranks, 0);
    for (int rank = 0; rank < ranks; ++rank) {
      for (const int expert : placed[rank]) rank_load[rank] += share[expert];
    }
    for (const int expert : Descending(share)) {
      for (int copy = 1; copy < copies[expert]; ++copy) {
        int best = -1;
        for (int rank = 0; rank < ranks; ++rank) {
          if (static_cast<int>(placed[rank].size()) >= slots_per_rank || Contains(placed[rank], expert))
            continue;
          if (best < 0 || rank_load[rank] < rank_load[best]) best = rank;
        }
        if (best < 0) break;
        placed[best].push_back(expert);
        rank_load[best] += share[expert];
      }
    }
    FillSlots(placed, tokens, slots_per_rank);
    SwapExtremes(placed, tokens);
    placement.layers.push_back(std::move(placed));
  }
  return placement;
}

StatusOr<Placement> PlanLplbGraph(const LoadMatrix& load, int ranks, int slots_per_rank) {
  RETURN_IF_ERROR(CheckSlots(load, ranks, slots_per_rank));
  ASSIGN_OR_RETURN(const EplbPlan plan, PlanEplb(load, {.replicas = load.experts, .gpus = ranks}));
  Placement placement = FromEplb(plan, ranks);
  const int per_rank = load.experts / ranks, spare = slots_per_rank - per_rank;
  const bool cube = std::has_single_bit(static_cast<unsigned>(ranks));
  const int directions = std::max(1, static_cast<int>(std::bit_width(static_cast<unsigned>(ranks - 1))));
  for (int layer = 0; layer < load.layers; ++layer) {
    const std::span<const double> tokens = load.layer(layer);
    LayerPlacement& placed = placement.layers[layer];
    for (std::vector<int>& rank : placed)
      std::stable_sort(rank.begin(), rank.end(), [&](int a, int b) { return tokens[a] > tokens[b]; });
    const LayerPlacement own = placed;
    for (int rank = 0; rank < ranks; ++rank) {
      for (int i = 0; i < std::min(spare, per_rank); ++i) {
        const int distance = 1 << (i % directions);
        const int neighbour = cube ? (rank ^ distance) % ranks : (rank + distance) % ranks;
        if (!Contains(placed[rank], own[neighbour][i])) placed[rank].push_back(own[neighbour][i]);
      }
    }
  }
  return placement;
}

}  // namespace moesaic::parallel
