// For tests: machines with more NUMA nodes than the one they run on.
#pragma once

#include "runtime/topology.h"

namespace moesaic::runtime {

/// Nodes 0 to nodes - 1, each of `cpus_each` hardware threads. Threads that are to be bound to ones which the
/// machine lacks run anywhere.
inline Topology PretendedNodes(int nodes, int cpus_each) {
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
