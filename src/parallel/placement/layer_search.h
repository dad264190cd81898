// Search for the placement of one layer that balances ranks in many scenarios of load at once.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "parallel/placement/layer_cost.h"
#include "parallel/placement/placement.h"

namespace moesaic::parallel {

/// Loads of one layer in several scenarios. Loads of a scenario sum to the sum of the ranks' speeds, so that
/// a balanced rank has load / speed = 1.
struct ScenarioLoads {
  int scenarios = 0;
  std::vector<float> loads = {};  // [experts, padded scenarios]
  /// Function from a replica's share of the loads to its cost; null: the cost is the share. `rows` is the
  /// number of rows of a batch for a load of 1. `scale` [scenarios] scales costs so that those of single
  /// replicas sum to the sum of the ranks' speeds.
  const ExpertTime* time = nullptr;
  double rows = 0;
  std::vector<double> scale = {};

  int padded() const { return (scenarios + 3) / 4 * 4; }
  int experts() const { return scenarios == 0 ? 0 : static_cast<int>(loads.size()) / padded(); }
};

/// Home nodes of experts, and the cost of placing experts elsewhere.
struct HomeNodes {
  std::vector<int> of_expert = {};  ///< [experts]
  std::vector<int> of_rank = {};    ///< [ranks] node of the rank
  /// Cost of replicas that are not on the home node of their expert. If all tokens leave their home, the
  /// placement costs `weight` times a balanced one.
  double weight = 0;
};

/// Searches the placement of one layer. The objective is the sum of (load / speed)^16 over ranks and
/// scenarios, a smooth form of the maximum, in which every replica of an expert takes an equal share. With a
/// single scenario, whose maximum is known, the exponent is 64. Ranks hold distinct experts.
class LayerSearch {
 public:
  /// `speeds` and `slots` are per rank. The loads must outlive the search. `homes` adds the cost of tokens
  /// away from home to the objective.
  LayerSearch(const ScenarioLoads& loads, std::span<const double> speeds, std::span<const int> slots,
              HomeNodes homes = {});

  /// Returns numbers of replicas that fill all slots. Each further replica goes to the expert with the
  /// largest load per replica in any scenario. An expert gets at most one replica per rank.
  std::vector<int> ReplicaCounts();
  /// Returns numbers of replicas that fill all slots if each node holds only its own experts. Empty without
  /// homes, or if a node has too few slots.
  std::vector<int> HomeReplicaCounts();
  /// Places the largest replicas first, each on the rank where the objective grows least.
  void Place(const std::vector<int>& copies);
  /// Starts from a placement whose ranks hold distinct experts, within the slots.
  void Start(const LayerPlacement& layer);

  /// Applies the best swap, move, exchange or addition of a replica that involves a loaded rank, or any rank
  /// while most of the objective is the cost of tokens away from home, until none improves the objective,
  /// `max_steps` are done or `stop` returns true. Returns the number of steps. With `max_moves` >= 0, at most
  /// that many slots differ from the placement at the start. In this case the search keeps the placement with
  /// the smallest worst() of all its steps, which ignores homes, so that a larger number never gives a worse
  /// result.
  int Improve(int max_steps, const std::function<bool()>& stop, int max_moves = -1);

  /// Tries other replica counts and keeps the best placement. They help if ranks have few slots:
  /// ReplicaCounts() minimizes the largest replica, which makes many replicas of medium size that do not fit
  /// together. There are two parts, each with at most `max_tries` placements:
  ///
  /// 1. For several limits, each expert gets the fewest replicas that are not above the limit. The others go
  ///    to experts with one replica.
  /// 2. Single replicas move from cold experts to hot ones as long as that improves the objective.
  ///
  /// Ranks of two slots with a single scenario have a different search (SearchPairCounts).
  void ImproveCounts(int max_tries, const std::function<bool()>& stop);

  double objective() const;
  /// Returns the largest load / speed of a rank over all scenarios; WorstIn() of one scenario.
  double worst() const;
  double WorstIn(int scenario) const;
  const LayerPlacement& layer() const { return layer_; }

 private:
  struct Step {
    double gain = 0;
    enum Kind { kNone, kSwap, kMove, kExchange, kAdd } kind = kNone;
    int rank_a = 0, slot_a = 0, rank_b = 0, slot_b = 0;
    int expert = 0;  // of kExchange: replaces the expert of slot b; of kAdd: fills an empty slot of rank b
  };

  // Cost of each of `copies` replicas, [padded scenarios].
  const float* Share(int expert, int copies);
  // Largest of these costs.
  float Size(int expert, int copies);
  const float* unit(int expert) const { return units_.data() + static_cast<size_t>(expert) * padded_; }
  const float* load(int rank) const { return rank_load_.data() + static_cast<size_t>(rank) * padded_; }
  float* load(int rank) { return rank_load_.data() + static_cast<size_t>(rank) * padded_; }
  bool Holds(int rank, int expert) const {
    return holds_[static_cast<size_t>(rank) * experts_ + expert] != 0;
  }
  // Objective of a rank whose load changes by add - take.
  double Changed(int rank, const float* take, const float* add) const;
  bool Away(int expert, int rank) const {
    return homes_.weight > 0 && homes_.of_expert[expert] != homes_.of_rank[rank];
  }
  // Cost of an expert with `away` of its `copies` replicas away from home.
  double AwayCost(int expert, int away, int copies) const {
    return homes_.weight > 0 ? away_unit_ * mean_share_[expert] * away / copies : 0;
  }
  double RankCost(int rank) const { return Changed(rank, nullptr, nullptr); }
  void AddCopies(std::span<const int> experts, int spare, int most, std::vector<int>& copies);
  int CopiesWithin(int expert, float limit);  // fewest replicas whose size is at most `limit`
  // Returns true if the placement by pairs is known to be optimal.
  bool PairsDecide() const;
  void TryLimits(int max_tries, const std::function<bool()>& stop);
  void ShiftReplicas(int max_tries, const std::function<bool()>& stop);
  void SetUnit(int expert);
  void SetScale();
  void Put(int rank, int expert);
  void Recompute();
  // With `must_gain`, only swaps that lower the cost of `rank` count.
  void FindSwaps(int rank, bool must_gain, Step& best) const;
  void FindExchanges(int rank, Step& best);
  double ExchangeGain(int expert, int rank_b, int slot_b);
  double AdditionGain(int expert, int rank_b);
  double AwayGain(int expert, int rank_b) const;
  void Apply(const Step& step);
  int Moved() const;

  const ScenarioLoads& scenario_;
  int experts_, padded_;
  std::vector<float> inverse_speed_;  // [ranks]
  std::vector<int> slots_;            // [ranks]
  LayerPlacement layer_, start_;
  std::vector<int> copies_;                              // [experts]
  std::vector<std::vector<int>> ranks_of_;               // [experts]
  std::vector<float> units_;                             // [experts, padded]
  std::vector<std::vector<std::vector<float>>> shares_;  // [experts][copies - 1][padded], as they are needed
  std::vector<float> rank_load_;                         // [ranks, padded]
  std::vector<double> cost_;                             // [ranks]
  std::vector<char> holds_;                              // [ranks, experts]
  std::vector<float> scratch_;
  float scale_ = 0;  // of loads under the power
  HomeNodes homes_;
  std::vector<double> mean_share_;  // [experts] of all tokens, mean of scenarios; only with homes
  std::vector<int> away_;           // [experts] replicas away from home
  double away_unit_ = 0;            // cost if all tokens are away
};

}  // namespace moesaic::parallel
