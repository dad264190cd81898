// Bytes that a rank has sent, by level of the topology.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/topology/topology.h"

namespace moesaic::comm {

/// Messages between children of groups of one level: for level "cluster", messages between nodes.
struct LevelTraffic {
  std::string level;
  int64_t messages = 0;
  int64_t rows = 0;  ///< Rows of hidden states, or partial sums.
  int64_t row_bytes = 0;
  int64_t routing_bytes = 0;  ///< Counts, ids and weights.
};

/// Not thread-safe.
class TrafficCounter {
 public:
  TrafficCounter(const Topology& topology, int rank);

  void CountRows(int peer, int64_t rows, int64_t bytes);
  void CountRouting(int peer, int64_t bytes);
  /// Adds routing that travels in a message of rows.
  void AddRoutingBytes(int peer, int64_t bytes) { levels_[level_of_peer_[peer]].routing_bytes += bytes; }
  void Reset();
  /// Every level of the topology that has children, outermost first.
  const std::vector<LevelTraffic>& levels() const { return levels_; }

 private:
  std::vector<LevelTraffic> levels_;
  std::vector<int> level_of_peer_;  // [ranks]
};

}  // namespace moesaic::comm
