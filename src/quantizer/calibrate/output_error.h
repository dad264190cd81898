// What rounding does to a linear layer's outputs, measured on tokens.
#pragma once

#include <span>
#include <vector>

#include "kernels/ops.h"

namespace moesaic::quantizer {

/// Rows of one matrix [n, k], one after another.
struct WeightRows {
  const float* rows;
  int n;
};

/// Inputs [count, k] of a linear layer, one after another: some of the calibration tokens.
struct TokenSample {
  const float* rows;
  int count, k;
};

/// Outputs x W^T [count, n] in f32.
std::vector<float> Outputs(const kernels::ExecContext& ctx, const TokenSample& x, const WeightRows& w);

/// Sum of squared differences; in the same order whatever the number of threads.
double SquaredDistance(const kernels::ExecContext& ctx, std::span<const float> a, std::span<const float> b);

}  // namespace moesaic::quantizer
