// Location of a rank in its machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moesaic::comm {

/// Numbers are those of hwloc within the host, or -1: unknown, or the rank may run in several such domains.
struct RankPlace {
  std::string host;
  int socket = -1;
  int numa_node = -1;
  int cache = -1;  ///< last level cache
  int core = -1;
  int64_t memory_bytes = 0;  ///< of the host; 0: unknown
};

/// Returns the name of this machine.
std::string HostName();

/// Returns the place of the calling thread, by its affinity.
RankPlace PlaceOfThread();

/// Returns one line per fact about this machine: sockets, NUMA nodes, caches, and network cards and
/// accelerators with the NUMA node and the rate of their PCIe link.
std::vector<std::string> MachineFacts();

}  // namespace moesaic::comm
