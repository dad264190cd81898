// `moesaic verify` reads a quantized folder back and compares it with its source checkpoint.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernels/exec_context.h"
#include "kernels/kernel_table.h"
#include "quantizer/quantize_plan.h"

namespace moesaic::quantizer {

/// Returns the settings stored in a folder that was made from `source`, including its quantize.analysis.
StatusOr<OutputSettings> SettingsOf(const checkpoint::Checkpoint& quantized,
                                    const checkpoint::Checkpoint& source);
/// Returns options for a plan of such a folder, with unlimited memory.
QuantizeOptions OptionsOf(const OutputSettings& settings);

/// Errors of the linears of one kind, whose names have the same ending.
struct KindError {
  std::string kind;  // "q_a_proj", "experts.down_proj"
  size_t linears = 0;
  double error = 0, weight = 0;  // sums of squares of the rounding errors and of the weights
  double worst = 0;              // relative error of the worst linear, sqrt(error / weight)
  std::string worst_name;
};

struct VerifyReport {
  OutputSettings settings;  // settings stored in the folder
  size_t rounded = 0, other = 0;
  int64_t bytes = 0;  // compared bytes
  std::vector<KindError> kinds;
};

/// Called after each step with the number of bytes done and in all; returns false to stop.
using VerifyProgress = std::function<bool(int64_t done, int64_t total)>;

/// Checks the folder's weights in two ways. Each byte must equal the result of quantizing `source` with the
/// folder's settings. Each linear, read as the loader reads it, must be as near to the source as its grid
/// allows: within each scale, the mean squared error is at most that of the largest rounding error. Codes
/// that calibration decided are checked by their checksums in quantize.json instead, and their errors have no
/// bound. An error names the file and the tensor.
StatusOr<VerifyReport> Verify(const checkpoint::Checkpoint& quantized, const checkpoint::Checkpoint& source,
                              const kernels::KernelTable& kernels, runtime::ThreadPool& pool,
                              const VerifyProgress& progress);

}  // namespace moesaic::quantizer
