// Measures the speed of this machine in some seconds, for a forecast of a run.
#pragma once

#include <map>
#include <string>

#include "checkpoint/checkpoint.h"
#include "kernels/exec_context.h"
#include "kernels/kernel_table.h"
#include "quantizer/format/output_plan.h"

namespace moesaic::quantizer {

/// Bytes or values per second.
struct MachineRates {
  double read = 0;      // reads from the source's disk, past the page cache
  double write = 0;     // writes to the output's disk, flushed
  double round = 0;     // bf16 values rounded to output bytes, on all threads, at the slowest precision
  double together = 1;  // time of simultaneous reading and writing divided by the sum of both
  // Bytes copied between the page cache and buffers on one thread, the cost of buffered I/O.
  double copy = 0;
  double direct = 0;  // bytes of direct I/O per second of CPU time
  double touch = 0;   // bytes of new memory that the kernel maps on first touch, on one thread
  bool same_disk = true;
  std::map<std::string, double> rounds = {};  // `round` of each precision, by Precision::Name()
  bool whole_scales = false;                  // rounding needs a scale of all values of a linear (NVFP4)
};

/// Measures rates. `folder` is the output folder; empty: the working folder. Writes a temporary file of
/// 256 MiB there, or in the nearest existing ancestor, and reads it back.
StatusOr<MachineRates> MeasureRates(const checkpoint::Checkpoint& source, const OutputSettings& settings,
                                    const kernels::KernelTable& kernels, runtime::ThreadPool& pool,
                                    const std::string& folder, bool direct);

/// Returns the free bytes of the disk of `folder` (empty: the working folder), or -1 if unknown.
int64_t FreeBytes(const std::string& folder);

}  // namespace moesaic::quantizer
