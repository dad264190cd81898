// Measures the choices of kernels/tuning.h on this machine.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernels/tuning.h"
#include "runtime/thread_pool.h"

namespace moesaic::kernels {

/// One choice that was measured: what is built in, the best of the others, and how much faster it is.
struct TuningFinding {
  std::string what;    // "tiles from so many rows on, int8"
  int64_t before = 0;  // what is built in
  int64_t after = 0;   // what is taken
  double gain = 0;     // median of the rounds, over what is built in: 0.03 is 3% faster
  bool taken() const { return before != after; }
};

struct TuningResult {
  Tuning tuning;
  std::vector<TuningFinding> findings;
};

/// Called with steps done and in all, and what is measured, at least every few seconds; returns false to stop
/// with Cancelled.
using TuneProgress = std::function<bool(int64_t done, int64_t total, const std::string& what)>;

/// Tunes `table` as it was selected, on all threads of `pool`; takes some 200 MB of memory. A round measures
/// two choices one right after the other; another one than is built in is taken if it is 2% faster in the
/// median, faster in three of four rounds, and both once more in a second set of rounds.
StatusOr<TuningResult> Tune(const KernelTable& table, runtime::ThreadPool& pool,
                            const TuneProgress& progress);

}  // namespace moesaic::kernels
