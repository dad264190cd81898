// A linear layer y = x W^T (+ b) with a packed weight in any format.
#pragma once

#include <span>

#include "kernels/column_parts.h"
#include "layers/step.h"
#include "tensor/packed.h"

namespace moesaic::layers {

struct Linear {
  tensor::PackedMatrix weight;  // [n, k]
  const float* bias = nullptr;  // [n] or null

  int n() const { return weight.n(); }
  int k() const { return weight.k(); }
};

/// Sets y [rows, y_stride] = linear(x), or adds to y with `accumulate`. x is [rows, x_stride].
/// `parts` are those of y.
void Apply(const kernels::ExecContext& ctx, const Linear& linear, const float* x, int64_t x_stride, int rows,
           float* y, int64_t y_stride, bool accumulate = false, const kernels::ColumnParts& parts = {});

/// One of several linears with the same input x.
struct LinearOutput {
  const Linear* linear;
  float* y;  // [rows, y_stride]
  int64_t y_stride;
};

/// Applies all linears to x [rows, x_stride] in one parallel loop. x is quantized once for all linears that
/// share a format and an activation scale.
void ApplyGroup(const kernels::ExecContext& ctx, std::span<const LinearOutput> outputs, const float* x,
                int64_t x_stride, int rows);

}  // namespace moesaic::layers
