// The machine's topology as reported by hwloc. `doctor` prints it and the thread pool pins by it.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <string>
#include <vector>

namespace moesaic::runtime {

struct NumaNode {
  int index = 0;             // the operating system's number
  int64_t memory_bytes = 0;  // memory local to the node
  std::vector<int> cpus;     // hardware threads (the operating system's numbers)
};

struct CacheLevel {
  int level = 0;      // 1: the data cache nearest to the core
  int64_t bytes = 0;  // size of one cache
  int count = 0;      // number of such caches in the machine
};

struct Topology {
  std::string cpu_model;
  int sockets = 0;
  int cores = 0;  // cores that this process may use; all fields below are restricted likewise
  int hardware_threads = 0;
  std::vector<CacheLevel> caches;
  std::vector<NumaNode> numa_nodes;
  std::vector<int>
      cpus;  // the process's affinity mask: first one hardware thread of every core, then the others
  double cpu_quota = 0;  // CPU time limit of the control group, in cores; 0: no limit
  int64_t memory_bytes = 0;
  int64_t available_bytes = 0;         // see AvailableMemory()
  int64_t explicit_huge_pages = 0;     // number of reserved 2 MiB pages
  std::string transparent_huge_pages;  // "always", "madvise", "never", or "" if unknown

  /// Returns the number of threads that can run at full speed together: one per core, at most the quota. At
  /// least 1.
  int DefaultThreads() const;
};

/// Returns the bytes that can be allocated without swapping, within the control group's limit; 0 if unknown.
int64_t AvailableMemory();

/// Returns the hardware threads of one of `count` processes that share this topology's cores: those of
/// neighbouring cores, as even parts as possible. Processes share cores where there are fewer of them.
std::vector<int> ShareOfCpus(const Topology& topology, int index, int count);

/// Binds a thread of this process (0: the calling one), and threads that it creates later, to these hardware
/// threads. False if the system refuses.
bool BindToCpus(const std::vector<int>& cpus, pthread_t thread = 0);

/// Reads the topology again (some milliseconds). Values that cannot be determined are 0 or empty; cpus is
/// never empty.
Topology DetectTopology();

}  // namespace moesaic::runtime
