// Turns the router's top-k ids of one rank's tokens into physical experts, and counts them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "comm/exchange/expert_map.h"

namespace moesaic::comm {

/// Top-k choice of a rank's tokens. Id -1 selects no expert. A token may have an expert in two slots; each
/// slot then has its own row.
struct TopK {
  int64_t tokens = 0;
  int k = 0;
  std::span<const int32_t> ids;    // [tokens, k]
  std::span<const float> weights;  // [tokens, k]; empty: all 1
  /// Replica of each pair as an index into ExpertMap::ReplicasOf(); empty: chosen by ReplicaChooser.
  std::span<const int32_t> replicas;  // [tokens, k]
};

/// A (token, expert) pair whose replicas are all on dead ranks.
struct DroppedPair {
  int32_t token = 0, slot = 0, expert = 0;
  bool operator==(const DroppedPair&) const = default;
};

struct RouteEntry {
  int32_t physical = 0;  ///< ExpertMap::physical()
  int32_t slot = 0;
  float weight = 1;
};

/// Entries of each token, by slot.
struct TokenRoutes {
  std::vector<int32_t> begin;  // [tokens + 1] into `entries`
  std::vector<RouteEntry> entries;
  std::vector<DroppedPair> dropped;
};

inline constexpr int kMaxTopK = 255;
inline constexpr int kMaxPhysicalExperts = 1 << 24;
inline constexpr int kMaxExchangeRanks = 1 << 16;

/// Overwrites `routes`, whose memory is reused. InvalidArgument names the token and slot of an id, weight
/// (NaN) or replica out of range. A replica named by the caller on a dead rank is replaced by the chooser's.
Status RouteTokens(const TopK& topk, const ExpertMap& map, const ReplicaChooser& chooser,
                   TokenRoutes* routes);

/// Numbers of rows that this rank's tokens need: one per token and rank, group or expert.
struct ExchangeLayout {
  std::vector<int64_t> tokens_per_rank;    // [ranks]
  std::vector<int64_t> tokens_per_group;   // [groups of the level], in the order of the topology
  std::vector<int64_t> tokens_per_expert;  // [experts]; counts slots
  std::vector<DroppedPair> dropped;
};

/// Returns the index of each rank's group at a level, -1 for ranks without one, and sets `*groups` to their
/// number. NotFound lists the levels.
StatusOr<std::vector<int>> GroupOfRank(const Topology& topology, const std::string& level, int* groups);

ExchangeLayout CountLayout(const TokenRoutes& routes, const ExpertMap& map,
                           std::span<const int> group_of_rank, int groups);

}  // namespace moesaic::comm
