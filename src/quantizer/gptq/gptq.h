// GPTQ: rounding a matrix to a grid column by column, each with what the errors so far ask for, so that the
// layer's output on the calibration tokens changes least.
#pragma once

#include <span>

#include "base/status.h"
#include "kernels/ops.h"
#include "quantizer/format/grid.h"
#include "quantizer/gptq/factor.h"

namespace moesaic::quantizer {

struct GptqReport {
  double loss = 0;  // of the outputs: sum over rows of e H e^T with the damped H
  /// Loss over that of rounding to the nearest code with the same scales, on up to 64 of the rows: at most
  /// about 1, and far below where inputs are correlated. 1 where both are 0.
  double of_nearest = 1;
};

/// Rounds rows [n, k] by the factor of their inputs' Hessian (gate and up share one). Scales are chosen
/// first, from the weights as they are (so that any order of inputs keeps groups together): `search` as in
/// RoundToNearest. Most of the time is that of products [n, inputs before] x [inputs before, 512]; memory is
/// GptqBytes. Bits do not depend on the number of threads.
StatusOr<QuantizedMatrix> RoundByGptq(const kernels::ExecContext& ctx, const Grid& grid, const float* rows,
                                      int n, int k, const HessianFactor& factor, const ScaleSearch& search,
                                      GptqReport* report);

/// Scales by group of inputs, [groups][padded_rows >= n]: a column's stand one after another. 1 for none.
std::vector<float> ScalesByGroup(const QuantizedMatrix& matrix, int padded_rows);

/// GptqReport::of_nearest of what rows [n, k] became. losses(errors [count, k] by input, count) tells
/// e H e^T of each.
StatusOr<double> LossOfNearest(
    const kernels::ExecContext& ctx, const float* rows, const QuantizedMatrix& matrix,
    const std::function<StatusOr<std::vector<double>>(const float* errors, int count)>& losses);
/// Rows that LossOfNearest takes at most, and asks about twice as many.
inline constexpr int kOfNearestRows = 64;

/// Memory that RoundByGptq takes beside its result.
int64_t GptqBytes(const Grid& grid, int n, int k, int threads);

/// Sum over `count` rows of e H e^T with the factor's damped H, for errors e [count, k] by input: what a
/// rounding costs the layer's output.
double OutputLoss(const kernels::ExecContext& ctx, const HessianFactor& factor, const float* errors,
                  int count);

}  // namespace moesaic::quantizer
