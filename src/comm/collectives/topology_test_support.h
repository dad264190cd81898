// Topologies that tests of costs and choices use.
#pragma once

#include <random>
#include <vector>

#include "comm/topology/topology.h"
#include "comm/topology/topology_builder.h"

namespace moesaic::comm {

/// Groups of `sizes` devices each, joined by one port per group.
inline Topology GroupTopology(const std::vector<int>& sizes, const Link& inside, const Link& between) {
  TopologyBuilder builder;
  builder.AddGroup(-1, "cluster", between, 0);
  for (const int size : sizes) {
    const int node = builder.AddGroup(0, "node", inside, 0);
    for (int i = 0; i < size; ++i) builder.AddDevice(node, 0, 0);
  }
  return builder.Finish("groups", "test", {DeviceType{"device", {}, 1e12, 0}});
}

/// Nodes of 8 accelerators with a link of 160 GB/s per device, and 200 Gbit/s per node.
inline Topology NodesOfEight(int nodes) {
  return GroupTopology(std::vector<int>(nodes, 8), {3e-6, 160e9}, {8e-6, 25e9});
}

/// Two sockets x 2 PCIe switches x 2 cards x 2 chips.
inline Topology DualChipServer() {
  TopologyBuilder builder;
  builder.AddGroup(-1, "server", {6e-6, 20e9}, 0);
  for (int socket = 0; socket < 2; ++socket) {
    const int of_socket = builder.AddGroup(0, "socket", {5e-6, 26e9}, 0);
    for (int half = 0; half < 2; ++half) {
      const int of_switch = builder.AddGroup(of_socket, "pcie switch", {4e-6, 26e9}, 0);
      for (int card = 0; card < 2; ++card) {
        const int of_card = builder.AddGroup(of_switch, "card", {2e-6, 60e9}, 0);
        for (int chip = 0; chip < 2; ++chip) builder.AddDevice(of_card, 0, 0);
      }
    }
  }
  return builder.Finish("dual-chip server", "test", {DeviceType{"chip", {}, 1e12, 0}});
}

/// Random link of less than 20 us and at most `most_gb_per_s` GB/s.
inline Link RandomLink(unsigned most_gb_per_s, std::mt19937& random) {
  return {.latency_s = static_cast<double>(random() % 20) * 1e-6,
          .bytes_per_s = 1e9 * static_cast<double>(1 + random() % most_gb_per_s),
          .full_duplex = random() % 4 != 0,
          .shared = random() % 4 != 0};
}

/// Adds random groups and devices below `parent` until `devices` are placed.
inline void AddRandom(TopologyBuilder& builder, int parent, int devices, int depth, std::mt19937& random) {
  const auto port = [&] { return random() % 3 == 0 ? 1e9 * static_cast<double>(1 + random() % 20) : 0; };
  while (devices > 0) {
    const int size = 1 + static_cast<int>(random() % devices);
    if (depth == 3 || random() % 3 == 0) {
      for (int i = 0; i < size; ++i) builder.AddDevice(parent, 0, port());
    } else {
      const Link link = RandomLink(50, random);
      AddRandom(builder, builder.AddGroup(parent, "group", link, port()), size, depth + 1, random);
    }
    devices -= size;
  }
}

/// Tree of at most five levels with random groups, links and ports.
inline Topology RandomTopology(int devices, std::mt19937& random) {
  TopologyBuilder builder;
  builder.AddGroup(-1, "root", RandomLink(20, random), 0);
  AddRandom(builder, 0, devices, 0, random);
  return builder.Finish("random", "test", {DeviceType{"device", {}, 1e15, 0}});
}

}  // namespace moesaic::comm
