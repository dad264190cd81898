// How long calibration would take, told before it starts: from the shapes, the number of tokens, and what the
// machine delivers of each kind of product.
#pragma once

#include "quantizer/quantize_plan.h"

namespace moesaic::quantizer {

/// Multiply-adds a second.
struct CalibrationRates {
  double hessian = 0;  // tokens x inputs^2
  double factor = 0;   // inputs^3
  double round = 0;    // outputs x inputs^2
  double forward = 0;  // tokens x outputs x inputs
};

/// Measures them on matrices of some thousand inputs, for about two seconds.
StatusOr<CalibrationRates> MeasureCalibration(const kernels::ExecContext& ctx, const Grid& grid);

struct CalibrationForecast {
  double hessian_seconds = 0, factor_seconds = 0, round_seconds = 0, forward_seconds = 0;

  double seconds() const { return hessian_seconds + factor_seconds + round_seconds + forward_seconds; }
};

/// Of a plan whose settings are `settings`; routed experts are taken to share the tokens evenly.
CalibrationForecast ForecastCalibration(const QuantizePlan& plan, const OutputSettings& settings,
                                        const CalibrationRates& rates);

}  // namespace moesaic::quantizer
