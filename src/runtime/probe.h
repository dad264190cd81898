// Measures what the machine's memory delivers, to hold kernels' speed against.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "runtime/thread_pool.h"

namespace moesaic::runtime {

struct ReadBandwidth {
  double one_thread = 0;   // bytes a second, the calling thread alone
  double all_threads = 0;  // bytes a second, every worker on its own part at the same time
};

/// Reads `bytes_per_thread` of huge-page memory a thread several times and takes the best pass (others on the
/// machine only ever make it slower). Choose far more than the caches hold, or this measures them: 256 MiB a
/// thread takes about half a second. Fails when the memory can't be had.
StatusOr<ReadBandwidth> MeasureReadBandwidth(ThreadPool* pool, int64_t bytes_per_thread);

/// Reads the memory once from front to back, each worker a part of it: to be timed where what others on the
/// machine take changes from one moment to the next.
void ReadOnce(ThreadPool* pool, std::span<const std::byte> memory);

}  // namespace moesaic::runtime
