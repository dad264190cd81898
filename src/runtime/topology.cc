#include "runtime/topology.h"

#include <hwloc.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>

#include "runtime/group_limits.h"

namespace moesaic::runtime {
namespace {

struct TopologyDeleter {
  void operator()(hwloc_topology* topology) const { hwloc_topology_destroy(topology); }
};
using HwlocTopology = std::unique_ptr<hwloc_topology, TopologyDeleter>;

// Reads the mask of the process's first thread, because pinning may have narrowed the caller's own mask.
std::vector<int> AffinityMask() {
  constexpr int kMaxCpus = 1 << 16;
  std::vector<int> cpus;
  // The call fails if the system has more hardware threads than the set.
  for (int size = CPU_SETSIZE; cpus.empty() && size <= kMaxCpus; size *= 2) {
    std::vector<cpu_set_t> sets(size / CPU_SETSIZE);
    const size_t bytes = sets.size() * sizeof(cpu_set_t);
    if (sched_getaffinity(getpid(), bytes, sets.data()) != 0) continue;
    for (int cpu = 0; cpu < size; ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, sets.data())) cpus.push_back(cpu);
    }
  }
  if (cpus.empty()) cpus.push_back(0);
  return cpus;
}

std::string BracketedWord(const std::string& line) {
  const size_t open = line.find('['), close = line.find(']');
  if (open == std::string::npos || close == std::string::npos) return "";
  return line.substr(open + 1, close - open - 1);
}

void ReadMemory(Topology* t) {
  std::map<std::string, int64_t> meminfo = ReadCounts("/proc/meminfo");
  t->memory_bytes = meminfo["MemTotal:"] * 1024;
  t->available_bytes = GroupLimits().AvailableMemory(meminfo["MemAvailable:"] * 1024);
  t->explicit_huge_pages = meminfo["HugePages_Total:"];
  t->transparent_huge_pages = BracketedWord(ReadLine("/sys/kernel/mm/transparent_hugepage/enabled"));
}

void ReadCaches(hwloc_topology* hw, Topology* t) {
  for (hwloc_obj_type_t type : {HWLOC_OBJ_L1CACHE, HWLOC_OBJ_L2CACHE, HWLOC_OBJ_L3CACHE}) {
    const int count = hwloc_get_nbobjs_by_type(hw, type);
    if (count <= 0) continue;
    const hwloc_obj_t cache = hwloc_get_obj_by_type(hw, type, 0);
    t->caches.push_back(
        {static_cast<int>(cache->attr->cache.depth), static_cast<int64_t>(cache->attr->cache.size), count});
  }
}

void ReadNumaNodes(hwloc_topology* hw, const std::vector<int>& allowed, Topology* t) {
  for (hwloc_obj_t node = nullptr;
       (node = hwloc_get_next_obj_by_type(hw, HWLOC_OBJ_NUMANODE, node)) != nullptr;) {
    NumaNode out;
    out.index = static_cast<int>(node->os_index);
    out.memory_bytes = static_cast<int64_t>(node->attr->numanode.local_memory);
    for (int cpu : allowed) {
      if (hwloc_bitmap_isset(node->cpuset, static_cast<unsigned>(cpu)) != 0) out.cpus.push_back(cpu);
    }
    t->numa_nodes.push_back(std::move(out));
  }
}

// Orders the allowed hardware threads: the first of every core in hwloc's order (neighbours share caches and
// sockets), then the second of every core, and so on.
void OrderCpus(hwloc_topology* hw, const std::vector<int>& allowed, Topology* t) {
  std::vector<std::vector<int>> by_turn;
  std::vector<bool> placed(*std::ranges::max_element(allowed) + 1, false);
  for (hwloc_obj_t core = nullptr;
       (core = hwloc_get_next_obj_by_type(hw, HWLOC_OBJ_CORE, core)) != nullptr;) {
    size_t turn = 0;
    for (int cpu : allowed) {
      if (hwloc_bitmap_isset(core->cpuset, static_cast<unsigned>(cpu)) == 0) continue;
      if (by_turn.size() == turn) by_turn.emplace_back();
      by_turn[turn++].push_back(cpu);
      placed[cpu] = true;
    }
    if (turn > 0) ++t->cores;
  }
  for (const auto& turn : by_turn) t->cpus.insert(t->cpus.end(), turn.begin(), turn.end());
  for (int cpu : allowed) {
    if (placed[cpu]) continue;
    t->cpus.push_back(cpu);
    ++t->cores;  // hwloc knows no core for it: count it as one
  }
}

}  // namespace

int Topology::DefaultThreads() const {
  int threads = std::max(cores, 1);
  if (cpu_quota > 0) threads = std::min(threads, static_cast<int>(std::ceil(cpu_quota)));
  return std::max(threads, 1);
}

std::vector<int> ShareOfCpus(const Topology& topology, int index, int count) {
  const int cores = std::max(topology.cores, 1);
  int first = cores * index / count, end = cores * (index + 1) / count;
  if (first == end) {
    first = index % cores;
    end = first + 1;
  }
  std::vector<int> share(topology.cpus.begin() + first, topology.cpus.begin() + end);
  // The second threads of cores have the order of the first only if all cores have equally many.
  const int threads = static_cast<int>(topology.cpus.size());
  for (int turn = cores; threads % cores == 0 && turn < threads; turn += cores) {
    share.insert(share.end(), topology.cpus.begin() + turn + first, topology.cpus.begin() + turn + end);
  }
  return share;
}

bool BindToCpus(const std::vector<int>& cpus, pthread_t thread) {
  if (cpus.empty()) return false;
  std::vector<cpu_set_t> sets(*std::ranges::max_element(cpus) / CPU_SETSIZE + 1);
  const size_t bytes = sets.size() * sizeof(cpu_set_t);
  for (const int cpu : cpus) CPU_SET_S(cpu, bytes, sets.data());
  return pthread_setaffinity_np(thread != 0 ? thread : pthread_self(), bytes, sets.data()) == 0;
}

int64_t AvailableMemory() {
  return GroupLimits().AvailableMemory(ReadCounts("/proc/meminfo")["MemAvailable:"] * 1024);
}

Topology DetectTopology() {
  Topology t;
  const std::vector<int> allowed = AffinityMask();
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) == 0) {
    const HwlocTopology hw(raw);
    if (hwloc_topology_load(hw.get()) == 0) {
      t.sockets = std::max(hwloc_get_nbobjs_by_type(hw.get(), HWLOC_OBJ_PACKAGE), 1);
      ReadCaches(hw.get(), &t);
      ReadNumaNodes(hw.get(), allowed, &t);
      OrderCpus(hw.get(), allowed, &t);
      const hwloc_obj_t package = hwloc_get_obj_by_type(hw.get(), HWLOC_OBJ_PACKAGE, 0);
      const char* model = package != nullptr ? hwloc_obj_get_info_by_name(package, "CPUModel") : nullptr;
      if (model != nullptr) t.cpu_model = model;
    }
  }
  if (t.cpus.empty()) {
    t.cpus = allowed;
    t.cores = static_cast<int>(allowed.size());
  }
  t.hardware_threads = static_cast<int>(t.cpus.size());
  t.cpu_quota = GroupLimits().Cores();
  ReadMemory(&t);
  return t;
}

}  // namespace moesaic::runtime
