// Measures the machine's memory bandwidth, the reference for the speed of kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "runtime/thread_pool.h"

namespace moesaic::runtime {

/// Returns the bytes that each of `threads` threads reads in MeasureReadBandwidth(): 256 MiB, far more than
/// any cache. On a small host, all threads together read at most a quarter of the memory that is available,
/// but each at least 1 MiB.
int64_t ProbeBytes(int threads);

struct ReadBandwidth {
  double one_thread = 0;   // bytes per second, the calling thread alone
  double all_threads = 0;  // bytes per second, all workers reading their own parts simultaneously
};

/// Reads `bytes_per_thread` of huge-page memory per thread several times and returns the best pass, because
/// other processes only ever slow it down. Choose a size far beyond the caches, otherwise this measures them:
/// those of ProbeBytes() take about half a second. Fails if the memory cannot be allocated.
StatusOr<ReadBandwidth> MeasureReadBandwidth(ThreadPool* pool, int64_t bytes_per_thread);

/// Reads the memory once in order, each worker a part of it. Time it next to a kernel on machines where the
/// load by other processes changes from one moment to the next.
void ReadOnce(ThreadPool* pool, std::span<const std::byte> memory);

}  // namespace moesaic::runtime
