// Computes the least time that a finished run could take on this machine, from measured rates of its disk and
// CPU. `moesaic report --roofline` compares it with the time of the run.
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

struct Roofline {
  double disk_seconds = 0;  // time to read and write the bytes that the run moved
  /// Name and CPU seconds of each stage of QuantizeReport. "forward" includes the analysis. Matrix products
  /// run at the measured peak of dot products, and rounding without GPTQ at its measured rate in memory.
  std::vector<std::pair<std::string, double>> stages;
  std::string rates;  // the rates as one line of text
};

/// Returns Roofline::stages of a run with this plan. `least` is the forecast of calibration at peak rates;
/// null if the run was not calibrated.
std::vector<std::pair<std::string, double>> StagesAt(const QuantizePlan& plan, const OutputSettings& settings,
                                                     const MachineRates& rates,
                                                     const CalibrationForecast* least);

/// Computes the roofline of the run that made `quantized` from `source`. `read_bytes` and `written_bytes` are
/// the bytes that the run moved. Measures this machine for some seconds, as `quantize --plan` does, and
/// writes a temporary file of 256 MiB to the folder of `quantized`. Fails if that folder has no readable
/// settings.
StatusOr<Roofline> MeasureRoofline(const checkpoint::Checkpoint& quantized,
                                   const checkpoint::Checkpoint& source, const kernels::KernelTable& kernels,
                                   runtime::ThreadPool& pool, double read_bytes, double written_bytes);

}  // namespace moesaic::quantizer
