// The number grids that weights are rounded to, with the scales that compressed-tensors and DeepSeek's
// checkpoints store:
//
//   kInt8Channel  W[r, c] = code * scale[r]                                 int8 in [-127, 127]
//   kInt4Group    W[r, c] = code * scale[r, c / group]                      int4 in [-8, 7]
//   kNvfp4        W[r, c] = e2m1(code) * (scale[r, c / 16] / global_scale)  scale e4m3, global_scale f32
//   kFp8Block     W[r, c] = e4m3(code) * scale[r / 128, c / 128]
//   kInt8Group    W[r, c] = code * scale[r, c / group]                      int8 in [-127, 127]
//
// All scales but kNvfp4's are bf16 values, so a loader may keep them in the model's dtype without loss.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "kernels/exec_context.h"
#include "kernels/rounding.h"

namespace moesaic::quantizer {

/// Weights of this magnitude or more are rejected, because sums of products would overflow.
inline constexpr float kTooLarge = 0x1p96F;

enum class GridKind : uint8_t { kInt8Channel, kInt4Group, kNvfp4, kFp8Block, kInt8Group };

/// Maps a grid to the number grid of the kernels.
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
  /// Number of inputs that share a scale: 32, 64 or 128 (int4, int8 in groups), 16 (NVFP4), 128 (FP8). 0: all
  /// inputs of an output (int8).
  int group = 0;

  kernels::NumberGrid numbers() const { return NumbersOf(kind); }
  /// Returns the number of inputs and of outputs that share a scale, in a matrix with k inputs.
  int group_inputs(int k) const { return kind == GridKind::kInt8Channel || group == 0 ? k : group; }
  int group_outputs() const { return kind == GridKind::kFp8Block ? group : 1; }
  int scale_rows(int n) const { return (n + group_outputs() - 1) / group_outputs(); }
  int scale_columns(int k) const { return (k + group_inputs(k) - 1) / group_inputs(k); }
};

/// Fails unless `grid` exists and fits k inputs. Only FP8 blocks may be partial at an edge.
Status CheckGrid(const Grid& grid, int k);

/// Returns the number that `code` represents, before scaling.
float CodeValue(GridKind kind, uint8_t code);

struct QuantizedMatrix {
  Grid grid;
  int n = 0, k = 0;
  std::vector<uint8_t> codes;  // [n, k]: int8 and int4 as two's complement, e2m1 0..15, e4m3
  std::vector<float> scales;   // [scale_rows(n), scale_columns(k)], exact in the stored dtype
  float global_scale = 1;      // kNvfp4: divisor, as in compressed-tensors

  /// Returns the factor of the code in row r and column c.
  float Scale(int r, int c) const {
    const int64_t row = r / grid.group_outputs();
    return scales[row * grid.scale_columns(k) + c / grid.group_inputs(k)] / global_scale;
  }
};

/// Selects how scales are chosen.
struct ScaleSearch {
  /// false: the largest magnitude of a group gets the largest code, as with compressed-tensors' minmax
  /// observer (int8: 127). true: the candidate scale with the least sum of squared errors is taken. An int4
  /// scale may then be negative, which mirrors its range.
  bool by_error = false;
  std::span<const float> importance;  // [k] weights of the squared error of each input; empty: 1
  /// kNvfp4: global scale that fused matrices (q/k/v, gate/up) must share. 0: this matrix's own.
  float global_scale = 0;
};

/// Returns kNvfp4's global scale of values up to amax: 448 * 6 / amax, as in compressed-tensors. For searched
/// scales it is 256 * 6 / amax, so that the scale of a block can grow.
float Nvfp4GlobalScale(float amax, bool by_error);

/// Returns the f32 bits of the largest magnitude of rows [n, k], which are `stride` values apart. The bits of
/// a NaN compare greater than those of infinity.
uint32_t LargestBits(const kernels::ExecContext& ctx, const float* rows, int n, int k, int64_t stride);

/// Returns the largest magnitude of rows [n, k]. Fails with the position of a value that is not finite or not
/// below 2^96.
StatusOr<float> LargestMagnitude(const kernels::ExecContext& ctx, const float* rows, int n, int k);

/// Chooses scales for rows [n, k] without codes. The scale of a group depends on its own values (and the
/// global scale) only. A matrix may therefore be processed in runs of rows; for FP8 blocks these are
/// multiples of 128.
StatusOr<QuantizedMatrix> ChooseScales(const kernels::ExecContext& ctx, const Grid& grid, const float* rows,
                                       int n, int k, const ScaleSearch& search);

/// Calls ChooseScales, then rounds every value to its nearest code, ties to even.
StatusOr<QuantizedMatrix> RoundToNearest(const kernels::ExecContext& ctx, const Grid& grid, const float* rows,
                                         int n, int k, const ScaleSearch& search);

/// Converts rows [first, first + count) to f32 [count, k]: code * Scale(r, c). Each step is rounded to f32.
void Dequantize(const QuantizedMatrix& matrix, int first, int count, float* out);

}  // namespace moesaic::quantizer
