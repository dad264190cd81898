// How long calibration would take, told before it starts: from the shapes, the number of tokens, and what the
// machine delivers of each kind of product.
#pragma once

#include "quantizer/quantize_plan.h"

namespace moesaic::quantizer {

/// What `rows` rows of k inputs take when each of their values is multiplied k times: seconds a product and
/// a value.
struct ProductTime {
  double product = 0, value = 0;

  double Seconds(double rows, double k) const { return rows * k * (product * k + value); }
};

/// What GPTQ takes for a linear: besides, every run of rows that is rounded at once takes `slab` seconds
/// times inputs^2, for a sample of the losses and for reading the factor.
struct RoundTime {
  ProductTime rows;
  double slab = 0;

  double Seconds(double n, double k, double slabs) const { return rows.Seconds(n, k) + slabs * slab * k * k; }
};

struct CalibrationRates {
  ProductTime hessian;      // rows are tokens
  double clear = 0;         // seconds a value of a Hessian's half, before tokens are added
  double shrink = 0;        // and for leaning on another one
  ProductTime factor;       // inputs
  RoundTime round;          // outputs
  double value = 0;         // of a value that a norm takes from memory and back
  double forward = 0;       // seconds of a multiply-add of a token and a rounded weight
  double forward_kept = 0;  // and of one in bf16
  double attention = 0;     // of one in f32, as attention computes here
};

/// Measures them on matrices of 1,024 and 8,192 inputs, for some six seconds, with so many tokens at a time.
StatusOr<CalibrationRates> MeasureCalibration(const kernels::ExecContext& ctx, const Grid& grid,
                                              int part_rows);

struct CalibrationForecast {
  double hessian_seconds = 0, factor_seconds = 0, round_seconds = 0, forward_seconds = 0;
  /// Of Hessians and factors, what a walk takes that measures a mix's gains under GPTQ before the rounding.
  double gain_hessian_seconds = 0, gain_factor_seconds = 0;

  double seconds() const { return hessian_seconds + factor_seconds + round_seconds + forward_seconds; }
};

/// Of a plan whose settings are `settings`; routed experts are taken to share the tokens evenly.
CalibrationForecast ForecastCalibration(const QuantizePlan& plan, const OutputSettings& settings,
                                        const CalibrationRates& rates);

}  // namespace moesaic::quantizer
