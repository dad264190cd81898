#include "comm/exchange/traffic.h"

#include <map>

namespace moesaic::comm {

TrafficCounter::TrafficCounter(const Topology& topology, int rank) {
  // Groups are listed parents first, so that levels are found from the root on.
  std::map<std::string, int> index;
  for (const Group& group : topology.groups()) {
    if (group.children.empty()) continue;
    if (index.emplace(group.level, static_cast<int>(levels_.size())).second)
      levels_.push_back({.level = group.level});
  }
  level_of_peer_.resize(topology.ranks(), -1);
  for (int peer = 0; peer < topology.ranks(); ++peer) {
    if (peer != rank)
      level_of_peer_[peer] = index.at(topology.groups()[topology.CommonGroup(rank, peer)].level);
  }
}

void TrafficCounter::CountRows(int peer, int64_t rows, int64_t bytes) {
  LevelTraffic& level = levels_[level_of_peer_[peer]];
  ++level.messages;
  level.rows += rows;
  level.row_bytes += bytes;
}

void TrafficCounter::CountRouting(int peer, int64_t bytes) {
  LevelTraffic& level = levels_[level_of_peer_[peer]];
  ++level.messages;
  level.routing_bytes += bytes;
}

void TrafficCounter::Reset() {
  for (LevelTraffic& level : levels_) level = {.level = std::move(level.level)};
}

}  // namespace moesaic::comm
