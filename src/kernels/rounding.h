// Rounding weights to the numbers that a quantized format has: micro-kernels of the quantizer, chosen as
// those of micro_kernels.h are. No multiplication is fused with an addition and sums go by 16 partial sums
// (that of element i is number i % 16), so every instruction set computes the same bits.
#pragma once

#include <cstdint>

namespace moesaic::kernels {

/// Numbers that a weight divided by its scale is rounded to: the nearest, ties to even codes.
enum class NumberGrid : uint8_t {
  kInt8,  ///< -127..127, codes in two's complement
  kInt4,  ///< -8..7, codes in two's complement (of a byte)
  kE2M1,  ///< FP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6, sign in bit 3 of the code
  kE4M3,  ///< FP8: e4m3fn up to 448
};
inline constexpr int kNumberGrids = 4;

constexpr int kRoundBlockRows = 64;
constexpr int kRoundScales = 16;

/// Rounds columns one after another, each with what the errors of those before it ask for (GPTQ). `factor` is
/// upper triangular: sum over columns c of (sum over i <= c of error[i] * factor[i][c])^2 is the loss.
struct RoundBlock {
  int columns;                 // of this block
  const float* values;         // [columns][kRoundBlockRows]: one weight of each row
  const float* feedback;       // [columns][kRoundBlockRows]: the inner sum over columns before this block
  const float* const* scales;  // [columns] pointers to [kRoundBlockRows], not 0
  const float* factor;         // [columns][factor_stride]: row c holds factor[i][c] for i <= c
  int64_t factor_stride;       // floats
  float* errors;               // out [columns][kRoundBlockRows]: weight less what it became
  uint8_t* codes;              // out [columns][kRoundBlockRows]
  float* losses;               // [kRoundBlockRows] += each row's part of the loss
};

/// The functions of one grid. `scale` is not 0; `weight` may be null for all 1.
struct Rounding {
  void (*encode)(const float* values, int count, float scale, uint8_t* codes) = nullptr;
  /// Sum of weight[i] * (value - number * scale)^2.
  float (*error)(const float* values, const float* weight, int count, float scale) = nullptr;
  /// errors[s] = sum of weight[i] * (value - number * scales[s])^2 for kRoundScales scales, none 0. Values
  /// are multiplied by 1 / scale here: a tie may go the other way than in `error`.
  void (*scale_errors)(const float* values, const float* weight, int count, const float* scales,
                       float* errors) = nullptr;
  /// sums[0] = sum of weight * number * value, sums[1] = sum of weight * number^2: their ratio is the best
  /// scale for these codes.
  void (*scale_sums)(const float* values, const float* weight, int count, float scale, float* sums) = nullptr;
  void (*block)(const RoundBlock& block) = nullptr;
  /// Bits of the largest magnitude: those of infinity and NaN are larger than any number's.
  uint32_t (*largest_bits)(const float* values, int count) = nullptr;
};

}  // namespace moesaic::kernels
