// Measures the machine's memory bandwidth, the reference for the speed of kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "runtime/thread_pool.h"

namespace moesaic::runtime {

/// Bytes per thread that are far more than any cache.
constexpr int64_t kProbeBytes = int64_t{256} << 20;

struct ReadBandwidth {
  double one_thread = 0;   // bytes per second, the calling thread alone
  double all_threads = 0;  // bytes per second, all workers reading their own parts simultaneously
};

/// Reads `bytes_per_thread` of huge-page memory per thread several times and returns the best pass, because
/// other processes only ever slow it down. Choose a size far beyond the caches, otherwise this measures them:
/// kProbeBytes take about half a second. Fails if the memory cannot be allocated.
StatusOr<ReadBandwidth> MeasureReadBandwidth(ThreadPool* pool, int64_t bytes_per_thread);

/// Reads the memory once in order, each worker a part of it. Time it next to a kernel on machines where the
/// load by other processes changes from one moment to the next.
void ReadOnce(ThreadPool* pool, std::span<const std::byte> memory);

}  // namespace moesaic::runtime
