#include "parallel/link_levels.h"

#include <algorithm>
#include <map>

namespace moesaic::parallel {
namespace {

// Groups of one depth of the tree.
using Row = std::vector<const comm::Group*>;

// Whether the groups have equal numbers of adjacent ranks, and all of the topology's.
bool DividesRanks(const Row& groups, int ranks) {
  int next = 0;
  for (const comm::Group* group : groups) {
    if (group->ranks.size() != groups.front()->ranks.size()) return false;
    for (const int rank : group->ranks) {
      if (rank != next++) return false;
    }
  }
  return next == ranks;
}

}  // namespace

std::vector<LinkLevel> LinkLevelsOf(const comm::Topology& topology) {
  const std::vector<comm::Group>& groups = topology.groups();
  std::map<int, Row> by_depth;
  std::vector<int> depth(groups.size(), 0);
  for (size_t i = 1; i < groups.size(); ++i) {
    depth[i] = depth[groups[i].parent] + 1;
    by_depth[depth[i]].push_back(&groups[i]);
  }
  std::vector<LinkLevel> levels;
  for (const auto& [_, row] : by_depth) {
    const size_t ranks = row.front()->ranks.size();
    if (ranks < 2 || row.size() < 2 || !DividesRanks(row, topology.ranks())) continue;
    double slowest = 0;
    for (const comm::Group* group : row) {
      // A port of each device carries its own rank's rows.
      const double ports = groups[group->parent].link.shared ? 1 : static_cast<double>(ranks);
      const double rate = group->port_bytes_per_s * ports;
      slowest = slowest == 0 ? rate : std::min(slowest, rate);
    }
    if (slowest > 0) levels.push_back({.groups = static_cast<int>(row.size()), .bytes_per_s = slowest});
  }
  return levels;
}

std::vector<double> SpeedsOf(const comm::Topology& topology) {
  for (const char* dtype : {"bf16", "f32", "int8", "fp8"}) {
    std::vector<double> speeds;
    for (int rank = 0; rank < topology.ranks(); ++rank) {
      const auto& flops = topology.device_type(rank).flops;
      const auto found = flops.find(dtype);
      if (found == flops.end() || found->second <= 0) break;
      speeds.push_back(found->second);
    }
    if (std::ssize(speeds) < topology.ranks()) continue;
    const double fastest = std::ranges::max(speeds);
    if (std::ranges::min(speeds) == fastest) return {};
    for (double& speed : speeds) speed /= fastest;
    return speeds;
  }
  return {};
}

}  // namespace moesaic::parallel
