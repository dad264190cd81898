// Measures what the machine's memory delivers, to hold kernels' speed against.
#pragma once

#include <cstdint>

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

}  // namespace moesaic::runtime
