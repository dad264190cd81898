// What a run would take, told before it starts: from its plan, which needs no weights, and a short
// measurement of this machine.
#pragma once

#include <string>

#include "kernels/kernel_table.h"
#include "quantizer/quantize.h"

namespace moesaic::quantizer {

/// What this machine delivers, in bytes or values a second. Measured in some seconds.
struct MachineRates {
  double read = 0;   // the disk of the source, past the page cache
  double write = 0;  // the disk of the output, brought to disk
  double round = 0;  // values from bf16 to the output's bytes, all threads
  double copy = 0;   // bytes from the page cache and back, one thread; what buffered reads and writes cost
  bool same_disk = true;
};

/// `folder` is where the output would go, empty for the working folder: a file of 256 MiB is written beside
/// it, read back and removed.
StatusOr<MachineRates> MeasureRates(const checkpoint::Checkpoint& source, const OutputSettings& settings,
                                    const kernels::KernelTable& kernels, runtime::ThreadPool& pool,
                                    const std::string& folder, bool direct);

struct Forecast {
  double disk_seconds = 0;     // reading and writing
  double compute_seconds = 0;  // rounding and copying
  double seconds = 0;          // the larger: they overlap
  bool disk_bound = false;
};
Forecast ForecastOf(const QuantizePlan& plan, const MachineRates& rates, bool direct, int threads);

/// Bytes free where `folder` (empty: the working one) is or would be; -1 where nobody tells.
int64_t FreeBytes(const std::string& folder);

}  // namespace moesaic::quantizer
