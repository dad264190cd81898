// What `moesaic quantize --plan` prints.
#pragma once

#include <string>

#include "quantizer/calibrate/calibration_forecast.h"
#include "quantizer/io/machine_rates.h"
#include "quantizer/preflight.h"
#include "quantizer/quantize_plan.h"

namespace moesaic::app {

/// "0.3 s", "12 min", "1 h 30 min".
std::string FormatSeconds(double seconds);

/// The table of a plan: `what` becomes of `model`, in the folder `output` or, if that is empty, where one is.
/// `has_weights`: whether the source is more than a config.
void PrintPlan(const std::string& what, const std::string& model, const std::string& output,
               const quantizer::QuantizeOptions& options, const quantizer::QuantizePlan& plan,
               const quantizer::MachineRates& rates, const quantizer::Forecast& forecast,
               const quantizer::CalibrationForecast& calibration, bool has_weights);

}  // namespace moesaic::app
