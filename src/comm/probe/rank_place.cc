#include "comm/probe/rank_place.h"

#include <fmt/format.h>
#include <hwloc.h>
#include <sched.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <type_traits>

#include "runtime/topology.h"

namespace moesaic::comm {
namespace {

struct DestroyHwloc {
  void operator()(hwloc_topology_t topology) const { hwloc_topology_destroy(topology); }
};
using Hwloc = std::unique_ptr<std::remove_pointer_t<hwloc_topology_t>, DestroyHwloc>;

struct FreeBitmap {
  void operator()(hwloc_bitmap_t bitmap) const { hwloc_bitmap_free(bitmap); }
};
using Bitmap = std::unique_ptr<std::remove_pointer_t<hwloc_bitmap_t>, FreeBitmap>;

// Null if hwloc fails.
Hwloc LoadHwloc(bool with_devices) {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return nullptr;
  Hwloc topology(raw);
  if (with_devices) {
    hwloc_topology_set_io_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_IMPORTANT);
    // hwloc then reads PCI devices from sysfs. Its component for libpciaccess leaks memory when it is
    // unloaded.
    hwloc_topology_set_components(raw, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST, "pci");
  }
  if (hwloc_topology_load(raw) != 0) return nullptr;
  return topology;
}

// Number of the only NUMA node whose processors include all of `cpus`; -1 if there is none.
int NumaNodeOf(hwloc_topology_t topology, hwloc_const_cpuset_t cpus) {
  for (hwloc_obj_t node = nullptr;
       (node = hwloc_get_next_obj_by_type(topology, HWLOC_OBJ_NUMANODE, node)) != nullptr;) {
    if (hwloc_bitmap_isincluded(cpus, node->cpuset) != 0) return static_cast<int>(node->logical_index);
  }
  return -1;
}

std::string DeviceFact(hwloc_topology_t topology, hwloc_obj_t device) {
  const char* kind = device->attr->osdev.type == HWLOC_OBJ_OSDEV_NETWORK       ? "network card"
                     : device->attr->osdev.type == HWLOC_OBJ_OSDEV_OPENFABRICS ? "InfiniBand card"
                                                                               : "accelerator";
  std::string fact = fmt::format("{} {}", kind, device->name != nullptr ? device->name : "without a name");
  const hwloc_obj_t above = hwloc_get_non_io_ancestor_obj(topology, device);
  const int node = above == nullptr ? -1 : NumaNodeOf(topology, above->cpuset);
  if (node >= 0) fact += fmt::format(", NUMA node {}", node);
  for (hwloc_obj_t object = device; object != nullptr && object != above; object = object->parent) {
    if (object->type != HWLOC_OBJ_PCI_DEVICE || !(object->attr->pcidev.linkspeed > 0)) continue;
    fact += fmt::format(", PCIe link {:.3g} GB/s", object->attr->pcidev.linkspeed);
    break;
  }
  return fact;
}

}  // namespace

std::string HostName() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "localhost";
  return name.data();
}

RankPlace PlaceOfThread() {
  RankPlace place{.host = HostName(), .memory_bytes = runtime::DetectTopology().memory_bytes};
  const Hwloc topology = LoadHwloc(/*with_devices=*/false);
  if (topology == nullptr) return place;
  const Bitmap cpus(hwloc_bitmap_alloc());
  if (hwloc_get_cpubind(topology.get(), cpus.get(), HWLOC_CPUBIND_THREAD) != 0) return place;
  hwloc_bitmap_and(cpus.get(), cpus.get(), hwloc_topology_get_topology_cpuset(topology.get()));
  if (hwloc_bitmap_iszero(cpus.get()) != 0) return place;
  place.numa_node = NumaNodeOf(topology.get(), cpus.get());
  hwloc_obj_t object = hwloc_get_obj_covering_cpuset(topology.get(), cpus.get());
  for (; object != nullptr; object = object->parent) {
    const int index = static_cast<int>(object->logical_index);
    if (object->type == HWLOC_OBJ_PACKAGE) place.socket = index;
    if (object->type == HWLOC_OBJ_L3CACHE) place.cache = index;
    if (object->type == HWLOC_OBJ_CORE) place.core = index;
  }
  return place;
}

std::vector<std::string> MachineFacts() {
  const runtime::Topology machine = runtime::DetectTopology();
  std::vector<std::string> facts = {
      fmt::format("{}: {}, sockets {}, NUMA nodes {}, cores {}, memory {:.1f} GB", HostName(),
                  machine.cpu_model, machine.sockets, machine.numa_nodes.size(), machine.cores,
                  static_cast<double>(machine.memory_bytes) / 1e9)};
  for (const runtime::CacheLevel& cache : machine.caches) {
    facts.push_back(fmt::format("L{} caches: {} x {} KiB", cache.level, cache.count, cache.bytes >> 10));
  }
  const Hwloc topology = LoadHwloc(/*with_devices=*/true);
  if (topology == nullptr) return facts;
  for (hwloc_obj_t device = nullptr; (device = hwloc_get_next_osdev(topology.get(), device)) != nullptr;) {
    const auto type = device->attr->osdev.type;
    const bool shown = type == HWLOC_OBJ_OSDEV_NETWORK || type == HWLOC_OBJ_OSDEV_OPENFABRICS ||
                       type == HWLOC_OBJ_OSDEV_COPROC || type == HWLOC_OBJ_OSDEV_GPU;
    if (shown) facts.push_back(DeviceFact(topology.get(), device));
  }
  return facts;
}

}  // namespace moesaic::comm
