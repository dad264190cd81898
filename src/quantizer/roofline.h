// What a finished run would have taken at the rates of this machine's disk and processor, to hold its times
// against.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "quantizer/calibrate/calibration_forecast.h"
#include "quantizer/io/machine_rates.h"
#include "runtime/thread_pool.h"

namespace moesaic::quantizer {

/// Seconds at the machine's rates.
struct Roofline {
  double disk_seconds = 0;  // of the bytes moved, by the disk alone
  /// Of the processor alone, by name of QuantizeReport's stages. "forward" has the analysis in it.
  /// Calibration's products at the peak of dot products, rounding without GPTQ at what its kernels do from
  /// memory.
  std::vector<std::pair<std::string, double>> stages;
  std::string rates;  // what it is by, in words
};

/// Roofline::stages of a run with this plan; `least`: what calibration takes, null without one.
std::vector<std::pair<std::string, double>> StagesAt(const QuantizePlan& plan, const OutputSettings& settings,
                                                     const MachineRates& rates,
                                                     const CalibrationForecast* least);

/// Measures this machine for some seconds, as --plan does, with a scratch file in the folder of `quantized`,
/// which was made from `source` by moving so many bytes.
StatusOr<Roofline> MeasureRoofline(const checkpoint::Checkpoint& quantized,
                                   const checkpoint::Checkpoint& source, const kernels::KernelTable& kernels,
                                   runtime::ThreadPool& pool, double read_bytes, double written_bytes);

}  // namespace moesaic::quantizer
