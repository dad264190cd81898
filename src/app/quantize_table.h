// Prints the plan of `moesaic quantize --plan`.
#pragma once

#include <string>

#include "quantizer/calibrate/calibration_forecast.h"
#include "quantizer/io/machine_rates.h"
#include "quantizer/preflight.h"
#include "quantizer/quantize_plan.h"

namespace moesaic::app {

/// Returns "0.3 s", "12 min" or "1 h 30 min".
std::string FormatSeconds(double seconds);

/// Prints the table of a plan that quantizes `model` to `what` in folder `output`, or in the working folder
/// if empty. `has_weights`: the source is more than a config.
void PrintPlan(const std::string& what, const std::string& model, const std::string& output,
               const quantizer::QuantizeOptions& options, const quantizer::QuantizePlan& plan,
               const quantizer::MachineRates& rates, const quantizer::Forecast& forecast,
               const quantizer::CalibrationForecast& calibration, bool has_weights);

}  // namespace moesaic::app
