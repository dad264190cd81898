// Exact split of tokens over the replicas of one layer: the largest load per speed of a rank is minimal.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "parallel/placement/placement.h"

namespace moesaic::parallel {

/// Solver for one placement of a layer; loads change from batch to batch. It starts at a lower bound of the
/// threshold and moves load from ranks above it along shortest paths of replicas (Edmonds-Karp). Where no
/// path is left, the ranks that were reached hold only experts without a replica elsewhere. Their mean load
/// is a larger lower bound, and the next threshold (Newton's method on the minimum cut). The last threshold
/// is optimal up to rounding. Results depend on the arguments only. Not safe for concurrent use.
class TokenSplit {
 public:
  /// `speeds` holds the relative speed of each rank; empty: equal speeds. Repeated experts of a rank count as
  /// one.
  TokenSplit(const LayerPlacement& layer, int experts, std::span<const double> speeds = {});

  /// Splits `loads` [experts] and returns the largest load / speed of a rank.
  double Solve(std::span<const double> loads);
  /// Moves load to the ranks' limits `threshold` * speed as far as paths exist, from the state that Solve()
  /// or the last call left. Returns the load above the limits that remains.
  double Relax(double threshold);

  /// Adds a replica that later calls use; it has no load yet. The rank must not hold the expert.
  void AddReplica(int expert, int rank);

  const std::vector<double>& rank_loads() const { return rank_load_; }  ///< [ranks]
  /// Load of `expert` on `rank` after the last call; 0 if it has no replica there.
  double LoadOn(int expert, int rank) const;
  int ranks() const { return static_cast<int>(rank_load_.size()); }
  double speed(int rank) const { return speeds_[rank]; }
  bool Holds(int expert, int rank) const;
  /// Experts with a replica on the rank, those of AddReplica() last.
  std::span<const int> ExpertsOn(int rank) const { return experts_on_[rank]; }

  /// Whole tokens of each replica, in the order of ranks and slots of the layer given to the constructor.
  /// No rank exceeds ceil(optimum * speed); repeated experts of a rank get all tokens in their first slot.
  /// AddReplica() must not have been called.
  std::vector<std::vector<int64_t>> SplitTokens(std::span<const int64_t> tokens);

 private:
  struct Replica {
    int rank = 0;
    double load = 0;
  };
  struct Use {  // a replica on a rank, of an expert with several replicas
    int expert = 0, replica = 0;
  };

  void Assign(std::span<const double> loads);
  void Fill(int expert, double load);
  // Moves load along the shortest path from a rank above its limit to one below; false if there is none.
  bool Augment(std::span<const double> limits, double slack);
  double LowerBound() const;
  // Load / speed of the ranks that the last, failed Augment() reached.
  double CutThreshold() const;
  double RelaxTo(std::span<const double> limits, double slack);

  LayerPlacement layer_;
  int experts_ = 0;
  double total_speed_ = 0;
  std::vector<double> speeds_;                 // [ranks]
  std::vector<std::vector<Replica>> replica_;  // [experts]
  LayerPlacement experts_on_;                  // as layer_, distinct, with added replicas
  std::vector<std::vector<Use>> uses_;         // [ranks]
  std::vector<double> rank_load_, fixed_;      // [ranks]
  std::vector<int> order_;                     // experts with several replicas
  // Search state.
  std::vector<int> queue_, parent_rank_, parent_expert_;
  std::vector<int> parent_from_, parent_to_;  // replicas of the step to the rank
  std::vector<int> rank_mark_, expert_mark_;
  int mark_ = 0;
};

}  // namespace moesaic::parallel
