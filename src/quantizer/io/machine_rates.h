// What this machine delivers, measured in some seconds: for a forecast before hours go into a run.
#pragma once

#include <map>
#include <string>

#include "checkpoint/checkpoint.h"
#include "kernels/kernel_table.h"
#include "quantizer/format/output_plan.h"

namespace moesaic::quantizer {

/// In bytes or values a second.
struct MachineRates {
  double read = 0;      // the disk of the source, past the page cache
  double write = 0;     // the disk of the output, brought to disk
  double round = 0;     // values from bf16 to the output's bytes, all threads, of the slowest precision
  double together = 1;  // how much longer reading and writing take at once than one after the other
  double copy = 0;      // bytes from the page cache and back, one thread; what buffered reads and writes cost
  double direct = 0;    // bytes past the page cache for a second of a processor
  double touch = 0;     // bytes of new memory that the system brings when they are touched, one thread
  bool same_disk = true;
  std::map<std::string, double> rounds = {};  // `round` of each precision, by Precision::Name()
  bool whole_scales = false;                  // rounding needs a scale of all of a linear's values (NVFP4)
};

/// `folder` is where the output would go, empty for the working folder: a file of 256 MiB is written beside
/// it, read back and removed.
StatusOr<MachineRates> MeasureRates(const checkpoint::Checkpoint& source, const OutputSettings& settings,
                                    const kernels::KernelTable& kernels, runtime::ThreadPool& pool,
                                    const std::string& folder, bool direct);

/// Bytes free where `folder` (empty: the working one) is or would be; -1 where nobody tells.
int64_t FreeBytes(const std::string& folder);

}  // namespace moesaic::quantizer
