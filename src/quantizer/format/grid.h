// The grids that weights are rounded to, with the scales that compressed-tensors and DeepSeek's checkpoints
// store beside them:
//
//   kInt8Channel  W[r, c] = code * scale[r]                                 int8 in [-127, 127]
//   kInt4Group    W[r, c] = code * scale[r, c / group]                      int4 in [-8, 7]
//   kNvfp4        W[r, c] = e2m1(code) * (scale[r, c / 16] / global_scale)  scale e4m3, global_scale f32
//   kFp8Block     W[r, c] = e4m3(code) * scale[r / 128, c / 128]
//   kInt8Group    W[r, c] = code * scale[r, c / group]                      int8 in [-127, 127]
//
// Scales other than kNvfp4's are bf16 values: a loader may keep them in the model's own dtype without a loss.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "kernels/ops.h"

namespace moesaic::quantizer {

/// Weights from this magnitude on are refused: sums of products have no room left beyond.
inline constexpr float kTooLarge = 0x1p96F;

enum class GridKind : uint8_t { kInt8Channel, kInt4Group, kNvfp4, kFp8Block, kInt8Group };

/// How the kernels know a grid's numbers.
inline kernels::NumberGrid NumbersOf(GridKind kind) {
  switch (kind) {
    case GridKind::kInt4Group:
      return kernels::NumberGrid::kInt4;
    case GridKind::kNvfp4:
      return kernels::NumberGrid::kE2M1;
    case GridKind::kFp8Block:
      return kernels::NumberGrid::kE4M3;
    default:
      return kernels::NumberGrid::kInt8;
  }
}

struct Grid {
  GridKind kind = GridKind::kInt8Channel;
  /// Inputs that share a scale: 32, 64 or 128 (int4, int8 in groups), 16 (NVFP4), 128 (FP8); 0: all (int8).
  int group = 0;

  kernels::NumberGrid numbers() const { return NumbersOf(kind); }
  /// Inputs that share a scale in a matrix of k inputs, and outputs that do.
  int group_inputs(int k) const { return kind == GridKind::kInt8Channel || group == 0 ? k : group; }
  int group_outputs() const { return kind == GridKind::kFp8Block ? group : 1; }
  int scale_rows(int n) const { return (n + group_outputs() - 1) / group_outputs(); }
  int scale_columns(int k) const { return (k + group_inputs(k) - 1) / group_inputs(k); }
};

/// Whether `grid` exists and fits k inputs: only FP8 blocks may be cut short at an edge.
Status CheckGrid(const Grid& grid, int k);

/// The number that `code` stands for, before its scale.
float CodeValue(GridKind kind, uint8_t code);

struct QuantizedMatrix {
  Grid grid;
  int n = 0, k = 0;
  std::vector<uint8_t> codes;  // [n, k]: int8 and int4 as two's complement, e2m1 0..15, e4m3
  std::vector<float> scales;   // [scale_rows(n), scale_columns(k)], exact in the dtype that is stored
  float global_scale = 1;      // kNvfp4: divides, as compressed-tensors stores it

  /// What multiplies the codes of row r and column c.
  float Scale(int r, int c) const {
    const int64_t row = r / grid.group_outputs();
    return scales[row * grid.scale_columns(k) + c / grid.group_inputs(k)] / global_scale;
  }
};

/// How scales are chosen.
struct ScaleSearch {
  /// false: the largest magnitude of a group stands at the end of the codes (compressed-tensors' minmax
  /// observer; int8: 127). true: the scale among many whose sum of squared errors is least; int4's may be
  /// negative, which turns its range round.
  bool by_error = false;
  std::span<const float> importance;  // [k] multiplies the squared error of each input; empty: 1
  /// kNvfp4: of matrices that are fused at run time (q/k/v, gate/up) and must share it; 0: this matrix's own.
  float global_scale = 0;
};

/// kNvfp4's global scale of values up to amax: 448 * 6 / amax as compressed-tensors has it. For scales that
/// are searched it is 256 * 6 / amax, which leaves room for a block's scale to go up.
float Nvfp4GlobalScale(float amax, bool by_error);

/// The bits of the largest magnitude of rows [n, k], `stride` values apart, as f32; those of a NaN are beyond
/// infinity's.
uint32_t LargestBits(const kernels::ExecContext& ctx, const float* rows, int n, int k, int64_t stride);

/// The largest magnitude of rows [n, k]. A value that is not finite, or beyond 2^96, is an error that says
/// where it stands.
StatusOr<float> LargestMagnitude(const kernels::ExecContext& ctx, const float* rows, int n, int k);

/// Scales for rows [n, k] without codes. Each group's depends on its own values (and the global scale) only,
/// so a matrix may be done in runs of rows, FP8 blocks in multiples of 128.
StatusOr<QuantizedMatrix> ChooseScales(const kernels::ExecContext& ctx, const Grid& grid, const float* rows,
                                       int n, int k, const ScaleSearch& search);

/// ChooseScales, then every value to its nearest code, ties to even.
StatusOr<QuantizedMatrix> RoundToNearest(const kernels::ExecContext& ctx, const Grid& grid, const float* rows,
                                         int n, int k, const ScaleSearch& search);

/// Rows [first, first + count) as f32 [count, k]: code * Scale(r, c), each step rounded as in f32.
void Dequantize(const QuantizedMatrix& matrix, int first, int count, float* out);

}  // namespace moesaic::quantizer
