// The loops of rounding.h without branches, for the compiler to vectorize: included by one file for each
// instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/rounding.h"

namespace moesaic::kernels {
namespace {

constexpr int kRoundingLanes = 16;

inline float Abs(float x) { return __builtin_fabsf(x); }
inline float Least(float a, float b) { return a < b ? a : b; }
inline float Most(float a, float b) { return a > b ? a : b; }
inline uint32_t BitsOf(float x) { return __builtin_bit_cast(uint32_t, x); }
inline float FloatOf(uint32_t bits) { return __builtin_bit_cast(float, bits); }

// To the nearest integer, ties to even, for |x| < 2^22: in x + 1.5 x 2^23 the last bit is worth 1.
inline float RoundEven(float x) {
  constexpr float kShift = 0x1.8p23F;
  return (x + kShift) - kShift;
}

// How a weight that is divided by its scale becomes the nearest number, and that its code.
template <NumberGrid kGrid>
struct Numbers;

template <>
struct Numbers<NumberGrid::kInt8> {
  static float Nearest(float q) { return RoundEven(Least(Most(q, -127.0F), 127.0F)); }
  static uint8_t Code(float number) { return static_cast<uint8_t>(static_cast<int>(number)); }
};

template <>
struct Numbers<NumberGrid::kInt4> {
  static float Nearest(float q) { return RoundEven(Least(Most(q, -8.0F), 7.0F)); }
  static uint8_t Code(float number) { return static_cast<uint8_t>(static_cast<int>(number)); }
};

template <>
struct Numbers<NumberGrid::kE2M1> {
  // Steps of 1/2 below 2, of 1 below 4, of 2 above. A number's parity in its steps is that of its code.
  static float Nearest(float q) {
    const float m = Least(Abs(q), 6.0F);
    const float fine = 0.5F * RoundEven(2 * m), middle = RoundEven(m), coarse = 2 * RoundEven(0.5F * m);
    const float rounded = m < 2 ? fine : (m < 4 ? middle : coarse);
    return FloatOf(BitsOf(rounded) | (BitsOf(q) & 0x80000000U));
  }
  static uint8_t Code(float number) {
    const float m = Abs(number);
    const float code = m < 2 ? 2 * m : (m < 4 ? m + 2 : 0.5F * m + 4);
    return static_cast<uint8_t>(static_cast<uint32_t>(static_cast<int>(code)) | (BitsOf(number) >> 28 & 8U));
  }
};

template <>
struct Numbers<NumberGrid::kE4M3> {
  static float Nearest(float q) {
    const float m = Least(Abs(q), 448.0F);
    const uint32_t bits = BitsOf(m);
    const float normal = FloatOf((bits + 0x7ffffU + (bits >> 20 & 1U)) & 0xfff00000U);
    const float denormal = (m + 0x1p14F) - 0x1p14F;  // steps of 2^-9
    const float rounded = m < 0x1p-6F ? denormal : normal;
    return FloatOf(BitsOf(rounded) | (BitsOf(q) & 0x80000000U));
  }
  static uint8_t Code(float number) {
    const float m = Abs(number);
    const uint32_t normal = (BitsOf(m) - 0x3c000000U) >> 20;
    const auto denormal = static_cast<uint32_t>(static_cast<int>(Least(m, 1.0F) * 512));
    return static_cast<uint8_t>((m < 0x1p-6F ? denormal : normal) | (BitsOf(number) >> 24 & 0x80U));
  }
};

inline float SumOfLanes(const float (&lanes)[kRoundingLanes]) {
  float sum = 0;
  for (int l = 0; l < kRoundingLanes; ++l) sum += lanes[l];
  return sum;
}

template <NumberGrid kGrid>
void EncodeRun(const float* values, int count, float scale, uint8_t* codes) {
  using N = Numbers<kGrid>;
  for (int i = 0; i < count; ++i) codes[i] = N::Code(N::Nearest(values[i] / scale));
}

// `add` is called with an index and its lane.
template <typename Add>
inline void ForLanes(int count, const Add& add) {
  int i = 0;
  for (; i + kRoundingLanes <= count; i += kRoundingLanes) {
    for (int l = 0; l < kRoundingLanes; ++l) add(i + l, l);
  }
  for (int l = 0; i + l < count; ++l) add(i + l, l);
}

template <NumberGrid kGrid>
float ErrorOfRun(const float* values, const float* weight, int count, float scale) {
  float lanes[kRoundingLanes] = {};
  const auto square = [&](int i) {
    const float error = values[i] - Numbers<kGrid>::Nearest(values[i] / scale) * scale;
    return error * error;
  };
  if (weight == nullptr) {
    ForLanes(count, [&](int i, int lane) { lanes[lane] += square(i); });
  } else {
    ForLanes(count, [&](int i, int lane) { lanes[lane] += weight[i] * square(i); });
  }
  return SumOfLanes(lanes);
}

template <NumberGrid kGrid>
void ScaleSumsOfRun(const float* values, const float* weight, int count, float scale, float* sums) {
  float product[kRoundingLanes] = {}, square[kRoundingLanes] = {};
  ForLanes(count, [&](int i, int lane) {
    const float number = Numbers<kGrid>::Nearest(values[i] / scale);
    const float weighted = weight != nullptr ? weight[i] * number : number;
    product[lane] += weighted * values[i];
    square[lane] += weighted * number;
  });
  sums[0] = SumOfLanes(product);
  sums[1] = SumOfLanes(square);
}

template <NumberGrid kGrid>
void RoundBlockColumns(const RoundBlock& b) {
  using N = Numbers<kGrid>;
  constexpr int kRows = kRoundBlockRows;
  for (int c = 0; c < b.columns; ++c) {
    const int64_t at = int64_t{c} * kRows;
    const float* factor = b.factor + c * b.factor_stride;
    float sum[kRows];
    for (int r = 0; r < kRows; ++r) sum[r] = b.feedback[at + r];
    for (int i = 0; i < c; ++i) {
      const float* errors = b.errors + int64_t{i} * kRows;
      for (int r = 0; r < kRows; ++r) sum[r] += errors[r] * factor[i];
    }
    const float* scale = b.scales[c];
    const float pivot = factor[c];
    for (int r = 0; r < kRows; ++r) {
      const float wanted = b.values[at + r] + sum[r] / pivot;
      const float number = N::Nearest(wanted / scale[r]);
      const float rounded = number * scale[r];
      const float missed = (wanted - rounded) * pivot;
      b.errors[at + r] = b.values[at + r] - rounded;
      b.codes[at + r] = N::Code(number);
      b.losses[r] += missed * missed;
    }
  }
}

uint32_t LargestBitsOfRun(const float* values, int count) {
  uint32_t largest = 0;
  for (int i = 0; i < count; ++i) {
    const uint32_t bits = BitsOf(values[i]) & 0x7fffffffU;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

template <NumberGrid kGrid>
constexpr Rounding RoundingOf() {
  return {.encode = EncodeRun<kGrid>,
          .error = ErrorOfRun<kGrid>,
          .scale_sums = ScaleSumsOfRun<kGrid>,
          .block = RoundBlockColumns<kGrid>,
          .largest_bits = LargestBitsOfRun};
}

// [kNumberGrids]
#define MOESAIC_ROUNDING_TABLE                                                                         \
  {                                                                                                    \
    RoundingOf<NumberGrid::kInt8>(), RoundingOf<NumberGrid::kInt4>(), RoundingOf<NumberGrid::kE2M1>(), \
        RoundingOf<NumberGrid::kE4M3>()                                                                \
  }

}  // namespace
}  // namespace moesaic::kernels
