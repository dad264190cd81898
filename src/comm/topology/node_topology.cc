#include "comm/topology/node_topology.h"

#include <algorithm>

#include "comm/topology/topology_builder.h"

namespace moesaic::comm {
namespace {

constexpr Link kNodeLink = {.latency_s = 1e-6, .bytes_per_s = 5e9};
constexpr Link kClusterLink = {.latency_s = 20e-6, .bytes_per_s = 1.25e9};

}  // namespace

Topology TopologyOfNodes(std::span<const int> nodes, const std::string& name, const std::string& origin) {
  TopologyBuilder builder;
  const int count = *std::ranges::max_element(nodes) + 1;
  const int root = count > 1 ? builder.AddGroup(-1, "cluster", kClusterLink, 0) : -1;
  std::vector<int> device_of_rank(nodes.size());
  for (int node = 0; node < count; ++node) {
    const int group = builder.AddGroup(root, "node", kNodeLink, 0);
    for (size_t rank = 0; rank < nodes.size(); ++rank) {
      if (nodes[rank] != node) continue;
      device_of_rank[rank] = builder.devices();
      builder.AddDevice(group, 0, 0);
    }
  }
  return builder.Finish(name, origin, {DeviceType{.name = "rank", .flops = {}}}, device_of_rank);
}

}  // namespace moesaic::comm
