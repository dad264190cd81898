// `moesaic verify`: reads a quantized folder back and holds it against the checkpoint it was made from.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "quantizer/quantize_plan.h"

namespace moesaic::quantizer {

/// What a folder says it was made with from `source`, its quantize.analysis included.
StatusOr<OutputSettings> SettingsOf(const checkpoint::Checkpoint& quantized,
                                    const checkpoint::Checkpoint& source);
/// For a plan of such a folder, however much memory its run had.
QuantizeOptions OptionsOf(const OutputSettings& settings);

/// Errors of the linears whose names end alike.
struct KindError {
  std::string kind;  // "q_a_proj", "experts.down_proj"
  size_t linears = 0;
  double error = 0, weight = 0;  // sums of squares: of what rounding changed, and of the weights
  double worst = 0;              // relative error of the worst linear, sqrt(error / weight)
  std::string worst_name;
};

struct VerifyReport {
  OutputSettings settings;  // what the folder says it was made with
  size_t rounded = 0, other = 0;
  int64_t bytes = 0;  // compared
  std::vector<KindError> kinds;
};

/// Called after each step with bytes done and in all; returns false to stop.
using VerifyProgress = std::function<bool(int64_t done, int64_t total)>;

/// Two checks. Every byte of the folder's weights must be what its settings make of `source`; and every
/// linear, read as any checkpoint's is, must be as near to the source's as its grid allows: within each
/// scale's values the mean squared error is at most that of the largest rounding error. Of codes that
/// calibration decided, the checksum in quantize.json stands for them, and their errors have no bound. An
/// error names file and tensor.
StatusOr<VerifyReport> Verify(const checkpoint::Checkpoint& quantized, const checkpoint::Checkpoint& source,
                              const kernels::KernelTable& kernels, runtime::ThreadPool& pool,
                              const VerifyProgress& progress);

}  // namespace moesaic::quantizer
