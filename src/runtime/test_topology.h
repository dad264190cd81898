// Test support: topologies with more NUMA nodes than the host has.
#pragma once

#include "runtime/topology.h"

namespace moesaic::runtime {

/// Returns nodes 0 to nodes - 1 with `cpus_each` hardware threads each. Threads bound to hardware threads
/// that the host lacks run anywhere.
inline Topology SimulatedNodes(int nodes, int cpus_each) {
  Topology topology;
  topology.cores = topology.hardware_threads = nodes * cpus_each;
  for (int node = 0; node < nodes; ++node) {
    topology.numa_nodes.push_back({.index = node, .memory_bytes = 0, .cpus = {}});
    for (int i = 0; i < cpus_each; ++i) {
      topology.cpus.push_back(node * cpus_each + i);
      topology.numa_nodes.back().cpus.push_back(node * cpus_each + i);
    }
  }
  return topology;
}

}  // namespace moesaic::runtime
