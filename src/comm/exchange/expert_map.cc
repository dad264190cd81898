#include "comm/exchange/expert_map.h"

#include <algorithm>

#include "comm/exchange/route_hash.h"

namespace moesaic::comm {

StatusOr<ExpertMap> ExpertMap::Create(int experts, const std::vector<std::vector<int>>& by_rank) {
  ExpertMap map;
  map.rank_begin_.push_back(0);
  std::vector<std::vector<int32_t>> replicas(std::max(experts, 0));
  std::vector<int> last_rank(replicas.size(), -1);
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (size_t local = 0; local < by_rank[rank].size(); ++local) {
      const int expert = by_rank[rank][local];
      if (expert < 0 || expert >= experts) {
        return InvalidArgument("expert map: rank {} lists an expert outside [0, {}): {}", rank, experts,
                               expert);
      }
      if (last_rank[expert] == static_cast<int>(rank)) {
        return InvalidArgument("expert map: rank {} lists an expert twice, keep one copy per rank: {}", rank,
                               expert);
      }
      last_rank[expert] = static_cast<int>(rank);
      replicas[expert].push_back(static_cast<int32_t>(map.physical_.size()));
      map.physical_.push_back({expert, static_cast<int>(rank), static_cast<int>(local)});
    }
    map.rank_begin_.push_back(static_cast<int>(map.physical_.size()));
  }
  map.replicas_begin_.push_back(0);
  for (int expert = 0; expert < experts; ++expert) {
    if (replicas[expert].empty()) return InvalidArgument("expert map: no rank has expert {}", expert);
    map.replicas_.insert(map.replicas_.end(), replicas[expert].begin(), replicas[expert].end());
    map.replicas_begin_.push_back(static_cast<int>(map.replicas_.size()));
  }
  return map;
}

ExpertMap ExpertMap::Even(int experts, int ranks) {
  std::vector<std::vector<int>> by_rank(ranks);
  int next = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const int count = experts / ranks + (rank < experts % ranks ? 1 : 0);
    for (int i = 0; i < count; ++i) by_rank[rank].push_back(next++);
  }
  return *Create(experts, by_rank);
}

ReplicaChooser::ReplicaChooser(const Topology& topology, const ExpertMap& map, int rank, ReplicaChoice choice)
    : map_(&map), rank_(rank), distance_(map.ranks(), 0), dead_(map.ranks(), false) {
  if (choice == ReplicaChoice::kSpread) return;
  for (int peer = 0; peer < map.ranks(); ++peer) {
    if (peer == rank) continue;
    // A larger common group is farther.
    distance_[peer] = static_cast<int>(topology.groups()[topology.CommonGroup(rank, peer)].ranks.size());
  }
}

void ReplicaChooser::SetDead(const std::vector<bool>& dead) { dead_ = dead; }

int ReplicaChooser::Choose(int expert, int token) const {
  int best = -1, best_distance = 0;
  uint64_t best_hash = 0;
  for (const int32_t index : map_->ReplicasOf(expert)) {
    const int rank = map_->physical(index).rank;
    if (dead_[rank]) continue;
    const int distance = distance_[rank];
    if (best >= 0 && distance > best_distance) continue;
    const uint64_t hash = RouteHash(rank_, token, index);
    if (best < 0 || distance < best_distance || hash < best_hash) {
      best = index;
      best_distance = distance;
      best_hash = hash;
    }
  }
  return best;
}

}  // namespace moesaic::comm
