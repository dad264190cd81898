// Elementwise operators: normalization, activation, addition and rotary position embedding.
#pragma once

#include <cstdint>

#include "kernels/exec_context.h"

namespace moesaic::kernels {

/// y = RMSNorm(x) for rows of n floats; x == y is allowed.
struct RmsNormParams {
  const float* x;  // [rows, x_stride]
  int64_t x_stride;
  const float* weight;  // [n]
  float* y;             // [rows, y_stride]
  int64_t y_stride;
  int rows, n;
  float eps;
};
void RmsNorm(const ExecContext& ctx, const RmsNormParams& params);

/// y[i] = silu(gate[i]) * up[i] for every row i of n floats.
struct SiluMulParams {
  const float* gate;  // [rows, gate_stride]
  const float* up;    // [rows, up_stride]
  float* y;           // [rows, n]
  int64_t gate_stride, up_stride, y_stride;
  int rows, n;
};
void SiluMul(const ExecContext& ctx, const SiluMulParams& params);

/// y += x over `count` floats.
void Add(const ExecContext& ctx, const float* x, int64_t count, float* y);

/// Rotates the `dim` floats at x + row * stride + head * head_stride, for every row and head, by the angles
/// of positions[row]. The cos/sin tables are [max_position, dim/2].
struct RopeParams {
  float* x;
  int64_t stride, head_stride;  // floats
  int rows, heads, dim;
  const int32_t* positions;  // [rows]
  const float* cos;
  const float* sin;
  bool interleaved;
};
void Rope(const ExecContext& ctx, const RopeParams& params);

}  // namespace moesaic::kernels
