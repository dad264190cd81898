// Forecasts the time of calibration from shapes, the number of tokens, and measured rates of each kind of
// product.
#pragma once

#include "kernels/exec_context.h"
#include "quantizer/quantize_plan.h"

namespace moesaic::quantizer {

/// Time to multiply each value of some rows of k inputs k times: seconds per product and per value.
struct ProductTime {
  double product = 0, value = 0;

  double Seconds(double rows, double k) const { return rows * k * (product * k + value); }
};

/// Time of GPTQ for a linear. Each slab of rows additionally takes `slab` seconds times inputs^2 to sample
/// losses and to read the factor.
struct RoundTime {
  ProductTime rows;
  double slab = 0;

  double Seconds(double n, double k, double slabs) const { return rows.Seconds(n, k) + slabs * slab * k * k; }
};

struct CalibrationRates {
  ProductTime hessian;      // time to accumulate a Hessian; its rows are tokens
  ProductTime factor;       // time to factorize a Hessian; its rows are inputs
  RoundTime round;          // time to round a linear; its rows are outputs
  double clear = 0;         // seconds per value of a Hessian's half to clear it
  double shrink = 0;        // seconds per value of a Hessian's half to shrink it towards another Hessian
  double value = 0;         // seconds per value of a norm, for a load and a store
  double forward = 0;       // seconds per multiply-add of a token and a rounded weight
  double forward_kept = 0;  // seconds per multiply-add of a token and a bf16 weight
  double attention = 0;     // seconds per multiply-add of the walk's f32 attention
};

/// Measures rates on matrices of 1,024 and 8,192 inputs with `part_rows` tokens at a time. Takes some six
/// seconds.
StatusOr<CalibrationRates> MeasureCalibration(const kernels::ExecContext& ctx, const Grid& grid,
                                              int part_rows);

struct CalibrationForecast {
  double hessian_seconds = 0, factor_seconds = 0, round_seconds = 0, forward_seconds = 0;
  /// Hessians and factors of the walk that measures a mix's gains under GPTQ before the rounding.
  double gain_hessian_seconds = 0, gain_factor_seconds = 0;

  double seconds() const { return hessian_seconds + factor_seconds + round_seconds + forward_seconds; }
};

/// Forecasts a plan with these settings. Routed experts are assumed to share the tokens evenly.
CalibrationForecast ForecastCalibration(const QuantizePlan& plan, const OutputSettings& settings,
                                        const CalibrationRates& rates);

}  // namespace moesaic::quantizer
