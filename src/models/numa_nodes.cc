#include "models/numa_nodes.h"

#include <spdlog/spdlog.h>

#include "runtime/memory.h"

namespace moesaic::models {

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

}  // namespace moesaic::models
