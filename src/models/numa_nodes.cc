#include "models/numa_nodes.h"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "models/weight_image.h"
#include "runtime/memory.h"

namespace moesaic::models {
namespace {

double Gigabytes(int64_t bytes) { return static_cast<double>(bytes) / 1e9; }

}  // namespace

bool IsByNode(NumaPolicy policy) { return policy == NumaPolicy::kMirror || policy == NumaPolicy::kSlice; }

const char* ToString(NumaPolicy by_node) { return by_node == NumaPolicy::kMirror ? "mirrored" : "sliced"; }

int NumaPlacement::images() const { return IsByNode(policy) ? static_cast<int>(nodes.size()) : 1; }

std::vector<int> NodesToInterleave(std::vector<int> nodes, NumaPolicy policy) {
  if (policy == NumaPolicy::kLocal || nodes.size() < 2) return {};
  if (policy == NumaPolicy::kInterleave) return nodes;
  constexpr size_t kProbeBytes = 4096;
  StatusOr<runtime::Buffer> probe = runtime::Buffer::Allocate(kProbeBytes, /*huge=*/false);
  const Status taken = probe.ok() ? probe->Interleave(nodes) : probe.status();
  if (taken.ok()) return nodes;
  spdlog::warn("weights are not interleaved over the NUMA nodes: {}", Message(taken));
  return {};
}

Status CheckNodeMemory(const NumaPlacement& placement, int64_t image_bytes, int64_t available,
                       std::span<const runtime::NumaNode> nodes) {
  const int images = placement.images();
  const bool mirror = placement.policy == NumaPolicy::kMirror;
  const int64_t needed = image_bytes * images;
  if (available > 0 && needed > available) {
    return ResourceExhausted(
        "weights {} on {} NUMA nodes take {:.1f} GB, and {:.1f} GB of memory are free; {}",
        ToString(placement.policy), images, Gigabytes(needed), Gigabytes(available),
        mirror ? "--numa slice or interleave keeps one copy"
               : "--mmap on with --numa auto reads them from the file");
  }
  for (const runtime::NumaNode& node : nodes) {
    const bool used =
        std::find(placement.nodes.begin(), placement.nodes.end(), node.index) != placement.nodes.end();
    if (!used || node.memory_bytes == 0 || image_bytes <= node.memory_bytes) continue;
    return ResourceExhausted(
        "weights {} on {} NUMA nodes take {:.1f} GB of each, and node {} has {:.1f} GB; --numa interleave "
        "needs no equal parts",
        ToString(placement.policy), images, Gigabytes(image_bytes), node.index, Gigabytes(node.memory_bytes));
  }
  return OkStatus();
}

StatusOr<NumaPlacement> PlaceWeights(NumaPolicy policy, const WeightPlan& plan,
                                     const runtime::ThreadPool& pool) {
  if (policy == NumaPolicy::kLocal) return NumaPlacement{};
  const std::vector<runtime::NumaNode> machine = runtime::DetectTopology().numa_nodes;
  if (IsByNode(policy)) {
    NumaPlacement placement{.policy = policy, .nodes = {pool.numa_nodes().begin(), pool.numa_nodes().end()}};
    if (placement.nodes.size() < 2) {
      spdlog::warn("weights are not {}: {}", ToString(policy),
                   placement.nodes.empty() ? "there are more threads than cores, so they are not bound"
                                           : "all threads run on one NUMA node");
      return NumaPlacement{};
    }
    const int64_t image_bytes =
        policy == NumaPolicy::kMirror ? plan.bytes : SlicePlan(plan, placement.images()).bytes;
    RETURN_IF_ERROR(CheckNodeMemory(placement, image_bytes, runtime::AvailableMemory(), machine));
    return placement;
  }
  std::vector<int> nodes;
  for (const runtime::NumaNode& node : machine) {
    if (!node.cpus.empty()) nodes.push_back(node.index);
  }
  nodes = NodesToInterleave(std::move(nodes), policy);
  if (nodes.empty()) return NumaPlacement{};
  return NumaPlacement{.policy = NumaPolicy::kInterleave, .nodes = std::move(nodes)};
}

}  // namespace moesaic::models
