// A linear layer: y = x W^T (+ b), its weight packed in any format.
#pragma once

#include <span>

#include "layers/step.h"
#include "tensor/packed.h"

namespace moesaic::layers {

struct Linear {
  tensor::PackedMatrix weight;  // [n, k]
  const float* bias = nullptr;  // [n] or null

  int n() const { return weight.n(); }
  int k() const { return weight.k(); }
};

/// y [rows, y_stride] = linear(x), or += with `accumulate`. x is [rows, x_stride].
void Apply(const kernels::ExecContext& ctx, const Linear& linear, const float* x, int64_t x_stride, int rows,
           float* y, int64_t y_stride, bool accumulate = false);

/// One of several linears over the same x.
struct LinearOutput {
  const Linear* linear;
  float* y;  // [rows, y_stride]
  int64_t y_stride;
};

/// Applies all of them to x [rows, x_stride] in one pass over the pool. x is rounded once for all that share
/// a format and an activation scale.
void ApplyGroup(const kernels::ExecContext& ctx, std::span<const LinearOutput> outputs, const float* x,
                int64_t x_stride, int rows);

}  // namespace moesaic::layers
