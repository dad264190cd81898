// Groups of ranks whose links are alike, found in measured latencies and bandwidths.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "comm/probe/rank_place.h"
#include "comm/topology/topology.h"

namespace moesaic::comm {

/// Measured links between all pairs of ranks. Symmetric; the diagonal is unused.
struct LinkMatrix {
  explicit LinkMatrix(int ranks) : ranks(ranks), latency_s(ranks * ranks, 0), bytes_per_s(ranks * ranks, 0) {}

  void Set(int a, int b, double seconds, double rate) {
    latency_s[a * ranks + b] = latency_s[b * ranks + a] = seconds;
    bytes_per_s[a * ranks + b] = bytes_per_s[b * ranks + a] = rate;
  }
  double latency(int a, int b) const { return latency_s[a * ranks + b]; }
  double bandwidth(int a, int b) const { return bytes_per_s[a * ranks + b]; }

  int ranks = 0;
  std::vector<double> latency_s, bytes_per_s;  // [ranks, ranks]
};

/// A group of ranks; the children of one group have similar links between them. Leaves are single ranks.
struct RankGroup {
  std::vector<int> ranks;  ///< ascending
  std::vector<RankGroup> children;
  // Measured between its children once they are known; 0: not measured.
  double shared_ratio = 0;  ///< rate of two messages between the same two children, of that of one
  double duplex_ratio = 0;  ///< rate of two messages in opposite directions, of that of one
};

/// Divides the ranks by average linkage of the time of messages. A group is kept apart from the one around it
/// if the median latency or bandwidth differs by more than kLevelRatio. Ranks of one host are always one
/// group. Children are in the order of their smallest ranks.
RankGroup GroupRanks(const LinkMatrix& links, std::span<const RankPlace> places);
inline constexpr double kLevelRatio = 1.5;

/// Two ratios above this mean that two messages do not share a port.
inline constexpr double kParallelRatio = 1.5;

/// Returns the topology of measured groups. Latency and bandwidth are medians; a port that differs by more
/// than a quarter gets its own value. Levels are named by the places: cluster, node, socket, NUMA node,
/// cache, core. Device d is the d-th rank of the groups in order; the source of the file states it if this is
/// not the order of ranks.
Topology TopologyOf(const RankGroup& root, const LinkMatrix& links, std::span<const RankPlace> places,
                    const std::string& name, const std::string& origin);

}  // namespace moesaic::comm
