// GPTQ rounds a matrix to a grid column by column. Each column is first corrected by the errors so far, so
// that the layer's output on the calibration tokens changes least.
#pragma once

#include <span>

#include "base/status.h"
#include "kernels/exec_context.h"
#include "quantizer/format/grid.h"
#include "quantizer/gptq/factor.h"

namespace moesaic::quantizer {

struct GptqReport {
  double loss = 0;  // loss of the outputs: sum over rows of e H e^T with the damped H
  /// Loss divided by that of rounding to the nearest code with the same scales, on up to 64 rows. It is at
  /// most about 1, and far below where inputs are correlated. 1 if both are 0.
  double of_nearest = 1;
};

/// Rounds rows [n, k] with the factor of their inputs' Hessian, which gate and up share. Scales are chosen
/// first, from the original weights, so that any order of inputs keeps groups together. `search` is that of
/// RoundToNearest. Products [n, inputs before] x [inputs before, 512] take most of the time. Memory is
/// GptqBytes. Bits do not depend on the number of threads.
StatusOr<QuantizedMatrix> RoundByGptq(const kernels::ExecContext& ctx, const Grid& grid, const float* rows,
                                      int n, int k, const HessianFactor& factor, const ScaleSearch& search,
                                      GptqReport* report);

/// Returns scales by group of inputs, [groups][padded_rows >= n], so that a column's scales are contiguous.
/// Padding is 1.
std::vector<float> ScalesByGroup(const QuantizedMatrix& matrix, int padded_rows);

/// Returns GptqReport::of_nearest of the rounded rows [n, k]. losses(errors [count, k] by input, count)
/// returns e H e^T of each row.
StatusOr<double> LossOfNearest(
    const kernels::ExecContext& ctx, const float* rows, const QuantizedMatrix& matrix,
    const std::function<StatusOr<std::vector<double>>(const float* errors, int count)>& losses);
/// Maximum number of rows that LossOfNearest samples. It evaluates twice as many errors.
inline constexpr int kOfNearestRows = 64;

/// Returns the memory in bytes of RoundByGptq in addition to its result.
int64_t GptqBytes(const Grid& grid, int n, int k, int threads);

/// Returns the sum over `count` rows of e H e^T with the factor's damped H, for errors e [count, k] by input.
/// This is the loss of the layer's output.
double OutputLoss(const kernels::ExecContext& ctx, const HessianFactor& factor, const float* errors,
                  int count);

}  // namespace moesaic::quantizer
