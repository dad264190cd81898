// Placement of routed experts on ranks, with replicas. Every rank of a job has an equal map.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "comm/topology/topology.h"

namespace moesaic::comm {

/// A copy of an expert. Copies are numbered by rank, then by position on the rank: the *physical* experts.
struct ExpertReplica {
  int expert = 0;  ///< Routed expert of the model.
  int rank = 0;
  int local = 0;  ///< Position on its rank.
};

/// Immutable; safe to read from any thread.
class ExpertMap {
 public:
  /// `by_rank[rank]` lists the experts on a rank in local order; it may be empty, and two ranks may list one
  /// expert. InvalidArgument: an expert is out of range or on no rank, or a rank lists it twice.
  static StatusOr<ExpertMap> Create(int experts, const std::vector<std::vector<int>>& by_rank);
  /// Returns contiguous blocks in the order of ranks. The first `experts % ranks` ranks have one expert more.
  static ExpertMap Even(int experts, int ranks);

  int experts() const { return static_cast<int>(replicas_begin_.size()) - 1; }
  int ranks() const { return static_cast<int>(rank_begin_.size()) - 1; }
  int physical_experts() const { return static_cast<int>(physical_.size()); }
  int local_experts(int rank) const { return rank_begin_[rank + 1] - rank_begin_[rank]; }
  const ExpertReplica& physical(int index) const { return physical_[index]; }
  int PhysicalIndex(int rank, int local) const { return rank_begin_[rank] + local; }
  /// Returns the physical experts of one routed expert, ascending.
  std::span<const int32_t> ReplicasOf(int expert) const {
    return std::span(replicas_).subspan(replicas_begin_[expert],
                                        replicas_begin_[expert + 1] - replicas_begin_[expert]);
  }

 private:
  ExpertMap() = default;
  std::vector<ExpertReplica> physical_;
  std::vector<int> rank_begin_;      // [ranks + 1] into physical_
  std::vector<int32_t> replicas_;    // physical experts, grouped by routed expert
  std::vector<int> replicas_begin_;  // [experts + 1] into replicas_
};

/// Rule by which a rank chooses among the live replicas of an expert. Every choice depends on the source
/// rank, the token and the expert alone, and changes only for tokens whose replica died (rendezvous hashing).
enum class ReplicaChoice : uint8_t {
  kNearest,  ///< Nearest rank by topology; among equally near ones by hash.
  kSpread,   ///< By hash among all.
};

/// Chooses replicas for the tokens of one rank. Borrows the map.
class ReplicaChooser {
 public:
  ReplicaChooser(const Topology& topology, const ExpertMap& map, int rank, ReplicaChoice choice);
  /// Sets another map of the same ranks; borrowed.
  void SetMap(const ExpertMap& map) { map_ = &map; }
  /// Excludes dead ranks: `dead` has one flag per rank.
  void SetDead(const std::vector<bool>& dead);

  /// Returns the physical expert for one token; -1 when all replicas are on dead ranks.
  int Choose(int expert, int token) const;
  bool dead(int rank) const { return dead_[rank]; }

 private:
  const ExpertMap* map_;
  int rank_;
  std::vector<int> distance_;  // [ranks], larger is farther; all 0 for kSpread
  std::vector<bool> dead_;
};

}  // namespace moesaic::comm
