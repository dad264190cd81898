// Rounds weights to the number grid of a quantized format: micro-kernels of the quantizer, selected like
// those of micro_kernels.h. Multiplications and additions are not fused, and sums use 16 partial sums
// (element i goes to number i % 16), so all instruction sets compute the same bits.
#pragma once

#include <cstdint>

namespace moesaic::kernels {

/// Numbers to which a weight divided by its scale is rounded: the nearest, ties to even codes.
enum class NumberGrid : uint8_t {
  kInt8,  ///< -127..127, codes in two's complement
  kInt4,  ///< -8..7, codes in two's complement (as a byte)
  kE2M1,  ///< FP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6, sign in bit 3 of the code
  kE4M3,  ///< FP8: e4m3fn up to 448
};
inline constexpr int kNumberGrids = 4;

constexpr int kRoundBlockRows = 64;
constexpr int kRoundScales = 16;

/// Rounds columns one after another, each corrected for the errors of the earlier ones (GPTQ). `factor` is
/// upper triangular; the loss is the sum over columns c of (sum over i <= c of error[i] * factor[i][c])^2.
struct RoundBlock {
  int columns;                 // columns of this block
  const float* values;         // [columns][kRoundBlockRows]: one weight of each row
  const float* feedback;       // [columns][kRoundBlockRows]: the inner sum over columns before this block
  const float* const* scales;  // [columns] pointers to [kRoundBlockRows], not 0
  const float* factor;         // [columns][factor_stride]: row c holds factor[i][c] for i <= c
  int64_t factor_stride;       // floats
  float* errors;               // out [columns][kRoundBlockRows]: weight minus its rounded value
  uint8_t* codes;              // out [columns][kRoundBlockRows]
  float* losses;               // [kRoundBlockRows] incremented by each row's share of the loss
};

/// Functions of one grid. `scale` is not 0; a null `weight` means that all weights are 1.
struct Rounding {
  void (*encode)(const float* values, int count, float scale, uint8_t* codes) = nullptr;
  /// Returns the sum of weight[i] * (value - number * scale)^2.
  float (*error)(const float* values, const float* weight, int count, float scale) = nullptr;
  /// errors[s] = sum of weight[i] * (value - number * scales[s])^2 for kRoundScales scales, none of them 0.
  /// Values are multiplied by 1 / scale here, so a tie may round differently from `error`.
  void (*scale_errors)(const float* values, const float* weight, int count, const float* scales,
                       float* errors) = nullptr;
  /// sums[0] = sum of weight * number * value, sums[1] = sum of weight * number^2. Their ratio is the best
  /// scale for these codes.
  void (*scale_sums)(const float* values, const float* weight, int count, float scale, float* sums) = nullptr;
  void (*block)(const RoundBlock& block) = nullptr;
  /// Returns the bits of the largest magnitude; infinity and NaN are larger than any number.
  uint32_t (*largest_bits)(const float* values, int count) = nullptr;
};

}  // namespace moesaic::kernels
