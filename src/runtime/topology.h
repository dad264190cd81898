// What the machine is made of, by hwloc: what `doctor` prints and what the thread pool pins by.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moesaic::runtime {

struct NumaNode {
  int index = 0;             // the operating system's number
  int64_t memory_bytes = 0;  // local to the node
  std::vector<int> cpus;     // hardware threads, the operating system's numbers
};

struct CacheLevel {
  int level = 0;      // 1 is the data cache nearest to the core
  int64_t bytes = 0;  // of one cache
  int count = 0;      // how many of them the machine has
};

struct Topology {
  std::string cpu_model;
  int sockets = 0;
  int cores = 0;  // allowed ones, as everything below
  int hardware_threads = 0;
  std::vector<CacheLevel> caches;
  std::vector<NumaNode> numa_nodes;
  std::vector<int>
      cpus;  // the process's affinity mask: first one hardware thread of every core, then the others
  double cpu_quota = 0;  // cores' worth of time that the control group may use; 0: no limit
  int64_t memory_bytes = 0;
  int64_t available_bytes = 0;         // as AvailableMemory
  int64_t explicit_huge_pages = 0;     // reserved pages of 2 MiB
  std::string transparent_huge_pages;  // "always", "madvise", "never" or "" when unknown

  /// Threads that can run at full speed at once: one a core, no more than the quota pays for. At least 1.
  int DefaultThreads() const;
};

/// Bytes that can still be had without swapping, within the control group's limit; 0 when unknown.
int64_t AvailableMemory();

/// Reads the topology anew (some milliseconds). What can't be found stays 0 or empty; cpus is never empty.
Topology DetectTopology();

}  // namespace moesaic::runtime
