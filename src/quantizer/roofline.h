// Computes the time that a finished run would take at the rates of this machine's disk and CPU.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "kernels/exec_context.h"
#include "kernels/kernel_table.h"
#include "quantizer/calibrate/calibration_forecast.h"
#include "quantizer/io/machine_rates.h"
#include "runtime/thread_pool.h"

namespace moesaic::quantizer {

/// Seconds at the machine's rates.
struct Roofline {
  double disk_seconds = 0;  // for the moved bytes
  /// CPU time by stage of QuantizeReport. "forward" includes the analysis. Calibration's products are counted
  /// at the peak of dot products. Rounding without GPTQ is counted at its measured rate from memory.
  std::vector<std::pair<std::string, double>> stages;
  std::string rates;  // description of the rates
};

/// Returns Roofline::stages of a run with this plan. `least` is the minimum of calibration; null without
/// calibration.
std::vector<std::pair<std::string, double>> StagesAt(const QuantizePlan& plan, const OutputSettings& settings,
                                                     const MachineRates& rates,
                                                     const CalibrationForecast* least);

/// Measures this machine for some seconds, as --plan does, with a scratch file in the folder of `quantized`.
/// That folder was made from `source` by moving these numbers of bytes.
StatusOr<Roofline> MeasureRoofline(const checkpoint::Checkpoint& quantized,
                                   const checkpoint::Checkpoint& source, const kernels::KernelTable& kernels,
                                   runtime::ThreadPool& pool, double read_bytes, double written_bytes);

}  // namespace moesaic::quantizer
