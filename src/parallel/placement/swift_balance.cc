// SwiftBalance: redundant slots get hot experts, then the heaviest rank swaps experts with light ones. Loads
// are f32 where the published file has f32, since their rounding decides.
#include <algorithm>
#include <numeric>

#include "parallel/placement/balance.h"
#include "parallel/placement/baseline_slots.h"
#include "parallel/placement/migration.h"
#include "parallel/placement/published_balancers.h"

namespace moesaic::parallel {
namespace {

constexpr double kThreshold = 1.01;  // layers with a smaller imbalance stay as they are
constexpr double kIncrement = 0.01;  // least gain of a swap, of the mean rank load
constexpr int kSwaps = 100;
constexpr int kMaxSwiftRanks = 4096;  // the transfers of all pairs take 64 MiB
constexpr int kTransfers = 1;         // from one rank to another

// A number that NumPy 2 compares in f32 if either side is f32.
struct Mixed {
  double value = 0;
  bool is_float = false;

  bool operator<(const Mixed& other) const {
    if (is_float || other.is_float) return static_cast<float>(value) < static_cast<float>(other.value);
    return value < other.value;
  }
};

// The index of the largest value among those that `allowed` accepts; the last of equal ones. -1: none.
template <typename Value, typename Allowed>
int LastLargest(const std::vector<Value>& values, const Allowed& allowed) {
  int best = -1;
  for (int i = 0; i < static_cast<int>(values.size()); ++i) {
    if ((best < 0 || values[i] >= values[best]) && allowed(i)) best = i;
  }
  return best;
}

// Balances one layer.
class SwiftLayer {
 public:
  SwiftLayer(const LayerPlacement& start, std::span<const double> loads)
      : layer_(start),
        loads_(loads),
        ranks_(static_cast<int>(start.size())),
        redundant_(ranks_),
        home_(loads.size(), -1),
        rank_load_(ranks_, 0.0F),
        sent_(static_cast<size_t>(ranks_) * ranks_, 0),
        received_(ranks_) {}

  // Moves at most `kSwaps` pairs of experts, while each gains `least_gain`. Returns the largest rank load.
  double Run(double least_gain) {
    FindRedundantSlots();
    FillRedundantSlots();
    for (int swap = 0; swap < kSwaps; ++swap) {
      std::vector<int> order(ranks_);
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(),
                       [&](int a, int b) { return rank_load_[a] < rank_load_[b]; });
      largest_ = rank_load_[order.back()];
      const int high = order.back();
      order.pop_back();
      if (std::none_of(order.begin(), order.end(), [&](int low) { return Swap(high, low, least_gain); }))
        break;
    }
    return largest_;
  }
  const LayerPlacement& layer() const { return layer_; }

 private:
  // The first replica in the order of slots, then ranks, stays; the others' slots are redundant.
  void FindRedundantSlots() {
    size_t slots = 0;
    for (const std::vector<int>& rank : layer_) slots = std::max(slots, rank.size());
    for (size_t slot = 0; slot < slots; ++slot) {
      for (int rank = 0; rank < ranks_; ++rank) {
        const int expert = layer_[rank][slot];
        if (home_[expert] < 0) {
          home_[expert] = rank;
        } else {
          redundant_[rank].push_back(static_cast<int>(slot));
          ++spare_;
        }
      }
    }
    for (int rank = 0; rank < ranks_; ++rank) {
      for (const int slot : redundant_[rank]) layer_[rank][slot] = -1;
    }
  }

  void FillRedundantSlots() {
    const int experts = static_cast<int>(loads_.size());
    std::vector<double> shares(loads_.begin(), loads_.end());
    std::vector<int> extra(experts, 0);
    for (int i = 0; i < spare_; ++i) {
      const int best = LastLargest(shares, [&](int e) { return extra[e] + 1 < ranks_; });
      if (best < 0) break;
      shares[best] = shares[best] * (extra[best] + 2) / (extra[best] + 3);
      ++extra[best];
    }
    share_.assign(shares.begin(), shares.end());
    for (int rank = 0; rank < ranks_; ++rank) {
      for (const int expert : layer_[rank]) {
        if (expert >= 0) rank_load_[rank] += share_[expert];
      }
    }
    std::vector<int> order(experts);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return share_[a] > share_[b]; });
    for (const int expert : order) {
      for (int copy = 0; copy < extra[expert]; ++copy) PlaceOnLightest(expert);
    }
    FillRest();
  }

  // On the lightest rank that has a redundant slot left; nowhere if the expert's home has sent an expert to
  // each of them.
  void PlaceOnLightest(int expert) {
    int best = -1;
    for (int rank = 0; rank < ranks_; ++rank) {
      if (redundant_[rank].empty() || HoldsExpert(layer_[rank], expert)) continue;
      if (sent(home_[expert], rank) >= kTransfers) continue;
      if (best < 0 || rank_load_[rank] < rank_load_[best]) best = rank;
    }
    if (best < 0) return;
    layer_[best][redundant_[best].back()] = expert;
    redundant_[best].pop_back();
    rank_load_[best] += share_[expert];
    Receive(expert, best);
  }

  // Slots that are left get the expert with the largest share that the rank lacks.
  void FillRest() {
    if (std::all_of(redundant_.begin(), redundant_.end(), [](const auto& slots) { return slots.empty(); }))
      return;
    const int experts = static_cast<int>(loads_.size());
    std::vector<int> copies(experts, 0);
    for (const std::vector<int>& rank : layer_) {
      for (const int expert : rank) copies[std::max(0, expert)] += expert >= 0 ? 1 : 0;
    }
    for (int e = 0; e < experts; ++e) share_[e] = static_cast<float>(loads_[e] / copies[e]);
    for (int rank = 0; rank < ranks_; ++rank) {
      for (const int slot : redundant_[rank]) {
        const int best = LastLargest(share_, [&](int e) { return !HoldsExpert(layer_[rank], e); });
        layer_[rank][slot] = best;
        Receive(best, rank);
        share_[best] =
            static_cast<float>(share_[best] * (static_cast<double>(copies[best]) / (copies[best] + 1)));
        ++copies[best];
      }
    }
    for (int rank = 0; rank < ranks_; ++rank) {
      rank_load_[rank] = 0;
      for (const int expert : layer_[rank]) rank_load_[rank] += share_[expert];
    }
  }

  // Swaps the pair of experts that leaves the smallest larger load. Neither rank may have received its one.
  bool Swap(int high, int low, double least_gain) {
    if (sent(low, high) >= kTransfers || sent(high, low) >= kTransfers) return false;
    Mixed least{largest_, false};
    int best_a = -1, best_b = -1;
    for (int a = 0; a < static_cast<int>(layer_[high].size()); ++a) {
      const int mine = layer_[high][a];
      if (HoldsExpert(layer_[low], mine) || HoldsExpert(received_[high], mine)) continue;
      for (int b = 0; b < static_cast<int>(layer_[low].size()); ++b) {
        const int theirs = layer_[low][b];
        if (HoldsExpert(layer_[high], theirs) || HoldsExpert(received_[low], theirs)) continue;
        const Mixed first{largest_ - double{share_[mine]} + double{share_[theirs]}, false};
        const Mixed second{rank_load_[low] - share_[theirs] + share_[mine], true};
        const Mixed larger = first < second ? second : first;
        if (!(larger < least)) continue;
        least = larger;
        best_a = a;
        best_b = b;
      }
    }
    if (best_a < 0) return false;
    const double gain = least.is_float ? static_cast<float>(largest_) - static_cast<float>(least.value)
                                       : largest_ - least.value;
    if (gain < least_gain) return false;
    const int mine = layer_[high][best_a], theirs = layer_[low][best_b];
    std::swap(layer_[high][best_a], layer_[low][best_b]);
    rank_load_[high] += share_[theirs] - share_[mine];
    rank_load_[low] += share_[mine] - share_[theirs];
    received_[high].push_back(theirs);
    received_[low].push_back(mine);
    ++sent(low, high);
    ++sent(high, low);
    return true;
  }

  void Receive(int expert, int rank) {
    ++sent(home_[expert], rank);
    received_[rank].push_back(expert);
  }
  int& sent(int from, int to) { return sent_[static_cast<size_t>(from) * ranks_ + to]; }

  LayerPlacement layer_;
  const std::span<const double> loads_;
  const int ranks_;
  std::vector<std::vector<int>> redundant_;  // slots of each rank without an expert
  int spare_ = 0;
  std::vector<int> home_;         // [experts] rank of the replica that stays
  std::vector<float> share_;      // [experts] load of a replica
  std::vector<float> rank_load_;  // [ranks]
  std::vector<int> sent_;         // [ranks, ranks] experts
  std::vector<std::vector<int>> received_;
  double largest_ = 0;
};

}  // namespace

StatusOr<Placement> PlanSwiftBalance(const LoadMatrix& load, int ranks, int slots_per_rank) {
  RETURN_IF_ERROR(CheckBaselineSlots(load, ranks, slots_per_rank));
  if (ranks > kMaxSwiftRanks)
    return InvalidArgument(
        "SwiftBalance counts transfers of all pairs of ranks, which must be at most {}, found {}",
        kMaxSwiftRanks, ranks);
  Placement placement{.experts = load.experts};
  const LayerPlacement start = StartOfVllm(load.experts, ranks, slots_per_rank);
  // The published file takes the mean rank load of layer 0 for all layers.
  const std::span<const double> first = load.layer(0);
  const double mean = std::accumulate(first.begin(), first.end(), 0.0) / ranks;
  for (int layer = 0; layer < load.layers; ++layer) {
    const std::span<const double> tokens = load.layer(layer);
    const double imbalance = Imbalance(start, tokens);
    LayerPlacement& placed = placement.layers.emplace_back(start);
    if (imbalance < kThreshold) continue;
    SwiftLayer search(start, tokens);
    if (search.Run(mean * kIncrement) / mean < imbalance) placed = KeepSlots(start, search.layer());
  }
  return placement;
}

}  // namespace moesaic::parallel
