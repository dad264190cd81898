// Measures the tuning parameters of kernels/tuning.h on this machine.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernels/tuning.h"
#include "runtime/thread_pool.h"

namespace moesaic::kernels {

/// Result of measuring one parameter: the default, the selected value and the speedup.
struct TuningFinding {
  std::string what;    // "minimum rows for tiles, int8"
  int64_t before = 0;  // default value
  int64_t after = 0;   // selected value
  double gain = 0;     // median speedup over the default in all rounds: 0.03 is 3% faster
  bool taken() const { return before != after; }
};

struct TuningResult {
  Tuning tuning;
  std::vector<TuningFinding> findings;
};

/// Called at least every few seconds with the steps completed, the total, and the parameter being measured;
/// returns false to stop with Cancelled.
using TuneProgress = std::function<bool(int64_t done, int64_t total, const std::string& what)>;

/// Tunes `table` as selected, on all threads of `pool`; uses about 200 MB of memory. A round measures two
/// values one right after the other. A value other than the default wins a set of rounds if it is 2% faster
/// in the median and faster in three of four rounds. It is selected if it wins two sets.
StatusOr<TuningResult> Tune(const KernelTable& table, runtime::ThreadPool& pool,
                            const TuneProgress& progress);

}  // namespace moesaic::kernels
