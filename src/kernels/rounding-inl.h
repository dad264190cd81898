// Branch-free loops of rounding.h on the compiler's vector types; one file per instruction set includes this.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/rounding.h"

namespace moesaic::kernels {
namespace {

constexpr int kLanes = 16;

// 16 lanes; the compiler splits them into as many registers as needed.
using F32 = float __attribute__((vector_size(64), aligned(4), may_alias));
using U32 = uint32_t __attribute__((vector_size(64)));
using I32 = int32_t __attribute__((vector_size(64)));
using U8 = uint8_t __attribute__((vector_size(16), aligned(1), may_alias));

inline F32 Broadcast(float x) { return F32{} + x; }
inline F32 Min(F32 a, float b) { return a < Broadcast(b) ? a : Broadcast(b); }
inline F32 Max(F32 a, float b) { return a > Broadcast(b) ? a : Broadcast(b); }
inline U32 BitsOf(F32 x) { return __builtin_bit_cast(U32, x); }
inline F32 FloatOf(U32 bits) { return __builtin_bit_cast(F32, bits); }
inline F32 Abs(F32 x) { return FloatOf(BitsOf(x) & 0x7fffffffU); }
inline U32 Truncated(F32 x) { return __builtin_bit_cast(U32, __builtin_convertvector(x, I32)); }

// Rounds to the nearest integer, ties to even, for |x| < 2^22: in x + 1.5 x 2^23 the last bit has value 1.
inline F32 RoundEven(F32 x) {
  constexpr float kShift = 0x1.8p23F;
  return (x + kShift) - kShift;
}

inline F32 Load(const float* from) { return *reinterpret_cast<const F32*>(from); }
inline void Store(F32 x, float* to) { *reinterpret_cast<F32*>(to) = x; }

// Loads the first `count` of 16 values, then zeros.
inline F32 LoadSome(const float* from, int count) {
  float padded[kLanes] = {};
  for (int l = 0; l < count; ++l) padded[l] = from[l];
  return Load(padded);
}

// Adds by halves: the order of additions does not depend on the register width.
inline float SumOf(F32 x) {
  float lanes[kLanes];
  Store(x, lanes);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

// Rounds a weight divided by its scale to the nearest number, and returns the number's code.
template <NumberGrid kGrid>
struct Numbers;

template <>
struct Numbers<NumberGrid::kInt8> {
  static F32 Nearest(F32 q) { return RoundEven(Min(Max(q, -127), 127)); }
  static U32 Code(F32 number) { return Truncated(number) & 0xffU; }
};

template <>
struct Numbers<NumberGrid::kInt4> {
  static F32 Nearest(F32 q) { return RoundEven(Min(Max(q, -8), 7)); }
  static U32 Code(F32 number) { return Truncated(number) & 0xffU; }
};

template <>
struct Numbers<NumberGrid::kE2M1> {
  // Steps are 1/2 below 2, 1 below 4, and 2 above. A number's parity in its steps is that of its code.
  static F32 Nearest(F32 q) {
    const F32 m = Min(Abs(q), 6);
    const F32 fine = 0.5F * RoundEven(2 * m), middle = RoundEven(m), coarse = 2 * RoundEven(0.5F * m);
    const F32 rounded = m < Broadcast(2) ? fine : (m < Broadcast(4) ? middle : coarse);
    return FloatOf(BitsOf(rounded) | (BitsOf(q) & 0x80000000U));
  }
  static U32 Code(F32 number) {
    const F32 m = Abs(number);
    const F32 code = m < Broadcast(2) ? 2 * m : (m < Broadcast(4) ? m + 2 : 0.5F * m + 4);
    return Truncated(code) | (BitsOf(number) >> 28 & 8U);
  }
};

template <>
struct Numbers<NumberGrid::kE4M3> {
  static F32 Nearest(F32 q) {
    const F32 m = Min(Abs(q), 448);
    const U32 bits = BitsOf(m);
    const F32 normal = FloatOf((bits + 0x7ffffU + (bits >> 20 & 1U)) & 0xfff00000U);
    const F32 denormal = (m + 0x1p14F) - 0x1p14F;  // steps of 2^-9
    const F32 rounded = m < Broadcast(0x1p-6F) ? denormal : normal;
    return FloatOf(BitsOf(rounded) | (BitsOf(q) & 0x80000000U));
  }
  static U32 Code(F32 number) {
    const F32 m = Abs(number);
    const U32 normal = (BitsOf(m) - 0x3c000000U) >> 20, denormal = Truncated(Min(m, 1) * 512);
    return (m < Broadcast(0x1p-6F) ? denormal : normal) | (BitsOf(number) >> 24 & 0x80U);
  }
};

inline U8 Bytes(U32 codes) { return __builtin_convertvector(codes, U8); }

template <NumberGrid kGrid>
void EncodeRun(const float* values, int count, float scale, uint8_t* codes) {
  using N = Numbers<kGrid>;
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    *reinterpret_cast<U8*>(codes + i) = Bytes(N::Code(N::Nearest(Load(values + i) / scale)));
  }
  if (i == count) return;
  uint8_t last[kLanes];
  *reinterpret_cast<U8*>(last) = Bytes(N::Code(N::Nearest(LoadSome(values + i, count - i) / scale)));
  for (int l = 0; i + l < count; ++l) codes[i + l] = last[l];
}

// Calls add(values, weights) for 16 values at a time; missing ones are 0.
template <typename Add>
inline void ForLanes(const float* values, const float* weight, int count, const Add& add) {
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    add(Load(values + i), weight != nullptr ? Load(weight + i) : Broadcast(1));
  }
  if (i < count) {
    add(LoadSome(values + i, count - i), weight != nullptr ? LoadSome(weight + i, count - i) : Broadcast(1));
  }
}

template <NumberGrid kGrid>
float ErrorOfRun(const float* values, const float* weight, int count, float scale) {
  F32 sum{};
  ForLanes(values, weight, count, [&](F32 value, F32 times) {
    const F32 error = value - Numbers<kGrid>::Nearest(value / scale) * scale;
    sum += times * (error * error);
  });
  return SumOf(sum);
}

// A lane is a scale, so nothing is summed across lanes.
template <NumberGrid kGrid>
void ErrorsOfScales(const float* values, const float* weight, int count, const float* scales, float* errors) {
  const F32 scale = Load(scales), inverse = 1 / scale;
  F32 sum{};
  for (int i = 0; i < count; ++i) {
    const F32 error = values[i] - Numbers<kGrid>::Nearest(values[i] * inverse) * scale;
    sum += (weight != nullptr ? weight[i] : 1) * (error * error);
  }
  Store(sum, errors);
}

template <NumberGrid kGrid>
void ScaleSumsOfRun(const float* values, const float* weight, int count, float scale, float* sums) {
  F32 product{}, square{};
  ForLanes(values, weight, count, [&](F32 value, F32 times) {
    const F32 number = Numbers<kGrid>::Nearest(value / scale);
    product += times * number * value;
    square += times * number * number;
  });
  sums[0] = SumOf(product);
  sums[1] = SumOf(square);
}

template <NumberGrid kGrid>
void RoundBlockColumns(const RoundBlock& b) {
  using N = Numbers<kGrid>;
  constexpr int kVectors = kRoundBlockRows / kLanes;
  for (int c = 0; c < b.columns; ++c) {
    const int64_t at = int64_t{c} * kRoundBlockRows;
    const float* factor = b.factor + c * b.factor_stride;
    F32 sum[kVectors];
    for (int v = 0; v < kVectors; ++v) sum[v] = Load(b.feedback + at + v * kLanes);
    for (int i = 0; i < c; ++i) {
      const float* errors = b.errors + int64_t{i} * kRoundBlockRows;
      for (int v = 0; v < kVectors; ++v) sum[v] += Load(errors + v * kLanes) * factor[i];
    }
    const float pivot = factor[c];
    for (int v = 0; v < kVectors; ++v) {
      const F32 value = Load(b.values + at + v * kLanes), scale = Load(b.scales[c] + v * kLanes);
      const F32 wanted = value + sum[v] / pivot;
      const F32 number = N::Nearest(wanted / scale);
      const F32 rounded = number * scale, missed = (wanted - rounded) * pivot;
      Store(value - rounded, b.errors + at + v * kLanes);
      *reinterpret_cast<U8*>(b.codes + at + v * kLanes) = Bytes(N::Code(number));
      Store(Load(b.losses + v * kLanes) + missed * missed, b.losses + v * kLanes);
    }
  }
}

uint32_t LargestBitsOfRun(const float* values, int count) {
  U32 largest{};
  ForLanes(values, nullptr, count, [&](F32 value, F32) {
    const U32 bits = BitsOf(value) & 0x7fffffffU;
    largest = bits > largest ? bits : largest;
  });
  uint32_t most = 0;
  for (int l = 0; l < kLanes; ++l) most = largest[l] > most ? largest[l] : most;
  return most;
}

template <NumberGrid kGrid>
constexpr Rounding RoundingOf() {
  return {.encode = EncodeRun<kGrid>,
          .error = ErrorOfRun<kGrid>,
          .scale_errors = ErrorsOfScales<kGrid>,
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
