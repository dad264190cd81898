// Measures the effect of rounding on a linear layer's outputs, on sample tokens.
#pragma once

#include <span>
#include <vector>

#include "kernels/exec_context.h"

namespace moesaic::quantizer {

/// Contiguous rows of one matrix [n, k].
struct WeightRows {
  const float* rows;
  int n;
};

/// Contiguous inputs [count, k] of a linear layer: a sample of the calibration tokens.
struct TokenSample {
  const float* rows;
  int count, k;
};

/// Returns the outputs x W^T [count, n] in f32.
std::vector<float> Outputs(const kernels::ExecContext& ctx, const TokenSample& x, const WeightRows& w);

/// Returns the sum of squared differences. The order of summation does not depend on the number of threads.
double SquaredDistance(const kernels::ExecContext& ctx, std::span<const float> a, std::span<const float> b);

}  // namespace moesaic::quantizer
