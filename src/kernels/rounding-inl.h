// Branch-free loops of rounding.h on 16 lanes in registers; one file per instruction set includes this.
#pragma once

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>

#include "kernels/rounding.h"

namespace moesaic::kernels {
namespace {

constexpr int kLanes = 16;

// GCC computes comparisons of vectors that are wider than a register one element at a time, so 16 lanes are
// an array of registers.
#if defined(__AVX512F__)
constexpr int kRegisterBytes = 64;
#elif defined(__AVX2__)
constexpr int kRegisterBytes = 32;
#else
constexpr int kRegisterBytes = 16;
#endif
constexpr int kRegisters = kLanes * 4 / kRegisterBytes;

using FloatRegister = float __attribute__((vector_size(kRegisterBytes)));
using UintRegister = uint32_t __attribute__((vector_size(kRegisterBytes)));
using IntRegister = int32_t __attribute__((vector_size(kRegisterBytes)));

template <typename T>
struct Lanes {
  using Register = T;
  Register part[kRegisters];
};
using F32 = Lanes<FloatRegister>;
using U32 = Lanes<UintRegister>;
using Mask = Lanes<IntRegister>;  // a lane is 0 or -1

template <typename R, typename Function>
inline R ForRegisters(const Function& function) {
  R result;
  for (int r = 0; r < kRegisters; ++r) result.part[r] = (typename R::Register)function(r);
  return result;
}

#define MOESAIC_LANE_OPERATOR(Result, T, op)                                    \
  inline Result operator op(const T& a, const T& b) {                           \
    return ForRegisters<Result>([&](int r) { return a.part[r] op b.part[r]; }); \
  }
MOESAIC_LANE_OPERATOR(F32, F32, +)
MOESAIC_LANE_OPERATOR(F32, F32, -)
MOESAIC_LANE_OPERATOR(F32, F32, *)
MOESAIC_LANE_OPERATOR(F32, F32, /)
MOESAIC_LANE_OPERATOR(Mask, F32, <)
MOESAIC_LANE_OPERATOR(Mask, U32, >)
MOESAIC_LANE_OPERATOR(U32, U32, +)
MOESAIC_LANE_OPERATOR(U32, U32, -)
MOESAIC_LANE_OPERATOR(U32, U32, |)
MOESAIC_LANE_OPERATOR(U32, U32, &)
#undef MOESAIC_LANE_OPERATOR

inline U32 operator>>(const U32& a, int bits) {
  return ForRegisters<U32>([&](int r) { return a.part[r] >> bits; });
}

inline F32 Broadcast(float x) {
  return ForRegisters<F32>([&](int) {
#if defined(__AVX512F__)
    return _mm512_set1_ps(x);
#elif defined(__AVX2__)
    return _mm256_set1_ps(x);
#else
    return FloatRegister{x, x, x, x};
#endif
  });
}
inline U32 Broadcast(uint32_t x) {
  return ForRegisters<U32>([&](int) { return UintRegister{} + x; });
}

template <typename T>
inline Lanes<T> Select(const Mask& mask, const Lanes<T>& a, const Lanes<T>& b) {
  return ForRegisters<Lanes<T>>([&](int r) { return mask.part[r] ? a.part[r] : b.part[r]; });
}
inline F32 Min(const F32& a, float b) { return Select(a < Broadcast(b), a, Broadcast(b)); }
inline F32 Max(const F32& a, float b) { return Select(Broadcast(b) < a, a, Broadcast(b)); }
inline U32 BitsOf(const F32& x) {
  return ForRegisters<U32>([&](int r) { return x.part[r]; });
}
inline F32 FloatOf(const U32& bits) {
  return ForRegisters<F32>([&](int r) { return bits.part[r]; });
}
inline F32 Abs(const F32& x) { return FloatOf(BitsOf(x) & Broadcast(0x7fffffffU)); }
inline U32 Truncated(const F32& x) {
  return ForRegisters<U32>([&](int r) { return __builtin_convertvector(x.part[r], IntRegister); });
}

// Rounds to the nearest integer, ties to even, for |x| < 2^22: in x + 1.5 x 2^23 the last bit has value 1.
inline F32 RoundEven(const F32& x) {
  const F32 shift = Broadcast(0x1.8p23F);
  return (x + shift) - shift;
}

inline F32 Load(const float* from) {
  using Unaligned = float __attribute__((vector_size(kRegisterBytes), aligned(4), may_alias));
  return ForRegisters<F32>([&](int r) { return reinterpret_cast<const Unaligned*>(from)[r]; });
}
inline void Store(const F32& x, float* to) {
  using Unaligned = float __attribute__((vector_size(kRegisterBytes), aligned(4), may_alias));
  for (int r = 0; r < kRegisters; ++r) reinterpret_cast<Unaligned*>(to)[r] = x.part[r];
}

// Loads the first `count` of 16 values, then zeros.
inline F32 LoadSome(const float* from, int count) {
  float padded[kLanes] = {};
  for (int l = 0; l < count; ++l) padded[l] = from[l];
  return Load(padded);
}

// Writes the low byte of each lane.
inline void StoreBytes(const U32& codes, uint8_t* to) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8((__m512i)codes.part[0]));
#elif defined(__AVX2__)
  const __m256i halves = _mm256_packus_epi32((__m256i)codes.part[0], (__m256i)codes.part[1]);
  const __m256i ordered = _mm256_permute4x64_epi64(halves, 0xd8);
  const __m128i bytes =
      _mm_packus_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
#else
  for (int l = 0; l < kLanes; ++l) to[l] = static_cast<uint8_t>(codes.part[l / 4][l % 4]);
#endif
}

// Adds by halves: the order of additions does not depend on the register width.
inline float SumOf(const F32& x) {
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
  static F32 Nearest(const F32& q) { return RoundEven(Min(Max(q, -127), 127)); }
  static U32 Code(const F32& number) { return Truncated(number) & Broadcast(0xffU); }
};

template <>
struct Numbers<NumberGrid::kInt4> {
  static F32 Nearest(const F32& q) { return RoundEven(Min(Max(q, -8), 7)); }
  static U32 Code(const F32& number) { return Truncated(number) & Broadcast(0xffU); }
};

template <>
struct Numbers<NumberGrid::kE2M1> {
  // Steps are 1/2 below 2, 1 below 4, and 2 above. A number's parity in its steps is that of its code.
  static F32 Nearest(const F32& q) {
    const F32 half = Broadcast(0.5F), two = Broadcast(2.0F);
    const F32 m = Min(Abs(q), 6);
    const F32 fine = half * RoundEven(two * m), middle = RoundEven(m), coarse = two * RoundEven(half * m);
    const F32 rounded = Select(m < two, fine, Select(m < Broadcast(4.0F), middle, coarse));
    return FloatOf(BitsOf(rounded) | (BitsOf(q) & Broadcast(0x80000000U)));
  }
  static U32 Code(const F32& number) {
    const F32 two = Broadcast(2.0F), four = Broadcast(4.0F);
    const F32 m = Abs(number);
    const F32 code = Select(m < two, two * m, Select(m < four, m + two, Broadcast(0.5F) * m + four));
    return Truncated(code) | (BitsOf(number) >> 28 & Broadcast(8U));
  }
};

template <>
struct Numbers<NumberGrid::kE4M3> {
  static F32 Nearest(const F32& q) {
    const F32 m = Min(Abs(q), 448);
    const U32 bits = BitsOf(m);
    const F32 normal =
        FloatOf((bits + Broadcast(0x7ffffU) + (bits >> 20 & Broadcast(1U))) & Broadcast(0xfff00000U));
    const F32 denormal = (m + Broadcast(0x1p14F)) - Broadcast(0x1p14F);  // steps of 2^-9
    const F32 rounded = Select(m < Broadcast(0x1p-6F), denormal, normal);
    return FloatOf(BitsOf(rounded) | (BitsOf(q) & Broadcast(0x80000000U)));
  }
  static U32 Code(const F32& number) {
    const F32 m = Abs(number);
    const U32 normal = (BitsOf(m) - Broadcast(0x3c000000U)) >> 20;
    const U32 denormal = Truncated(Min(m, 1) * Broadcast(512.0F));
    return Select(m < Broadcast(0x1p-6F), denormal, normal) | (BitsOf(number) >> 24 & Broadcast(0x80U));
  }
};

template <NumberGrid kGrid>
void EncodeRun(const float* values, int count, float scale, uint8_t* codes) {
  using N = Numbers<kGrid>;
  const F32 scales = Broadcast(scale);
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    StoreBytes(N::Code(N::Nearest(Load(values + i) / scales)), codes + i);
  }
  if (i == count) return;
  uint8_t last[kLanes];
  StoreBytes(N::Code(N::Nearest(LoadSome(values + i, count - i) / scales)), last);
  for (int l = 0; i + l < count; ++l) codes[i + l] = last[l];
}

// Calls add(values, weights) for 16 values at a time; missing ones are 0.
template <typename Add>
inline void ForLanes(const float* values, const float* weight, int count, const Add& add) {
  const F32 ones = Broadcast(1.0F);
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    add(Load(values + i), weight != nullptr ? Load(weight + i) : ones);
  }
  if (i < count) {
    add(LoadSome(values + i, count - i), weight != nullptr ? LoadSome(weight + i, count - i) : ones);
  }
}

template <NumberGrid kGrid>
float ErrorOfRun(const float* values, const float* weight, int count, float scale) {
  const F32 scales = Broadcast(scale);
  F32 sum = Broadcast(0.0F);
  ForLanes(values, weight, count, [&](const F32& value, const F32& times) {
    const F32 error = value - Numbers<kGrid>::Nearest(value / scales) * scales;
    sum = sum + times * (error * error);
  });
  return SumOf(sum);
}

// A lane is a scale, so nothing is summed across lanes.
template <NumberGrid kGrid>
void ErrorsOfScales(const float* values, const float* weight, int count, const float* scales, float* errors) {
  const F32 scale = Load(scales), inverse = Broadcast(1.0F) / scale;
  F32 sum = Broadcast(0.0F);
  for (int i = 0; i < count; ++i) {
    const F32 value = Broadcast(values[i]);
    const F32 error = value - Numbers<kGrid>::Nearest(value * inverse) * scale;
    sum = sum + Broadcast(weight != nullptr ? weight[i] : 1.0F) * (error * error);
  }
  Store(sum, errors);
}

template <NumberGrid kGrid>
void ScaleSumsOfRun(const float* values, const float* weight, int count, float scale, float* sums) {
  const F32 scales = Broadcast(scale);
  F32 product = Broadcast(0.0F), square = Broadcast(0.0F);
  ForLanes(values, weight, count, [&](const F32& value, const F32& times) {
    const F32 number = Numbers<kGrid>::Nearest(value / scales);
    product = product + times * number * value;
    square = square + times * number * number;
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
      const F32 times = Broadcast(factor[i]);
      for (int v = 0; v < kVectors; ++v) sum[v] = sum[v] + Load(errors + v * kLanes) * times;
    }
    const F32 pivot = Broadcast(factor[c]);
    for (int v = 0; v < kVectors; ++v) {
      const F32 value = Load(b.values + at + v * kLanes), scale = Load(b.scales[c] + v * kLanes);
      const F32 wanted = value + sum[v] / pivot;
      const F32 number = N::Nearest(wanted / scale);
      const F32 rounded = number * scale, missed = (wanted - rounded) * pivot;
      Store(value - rounded, b.errors + at + v * kLanes);
      StoreBytes(N::Code(number), b.codes + at + v * kLanes);
      Store(Load(b.losses + v * kLanes) + missed * missed, b.losses + v * kLanes);
    }
  }
}

uint32_t LargestBitsOfRun(const float* values, int count) {
  U32 largest = Broadcast(0U);
  ForLanes(values, nullptr, count, [&](const F32& value, const F32&) {
    const U32 bits = BitsOf(Abs(value));
    largest = Select(bits > largest, bits, largest);
  });
  uint32_t most = 0;
  for (const UintRegister& part : largest.part) {
    for (int l = 0; l < kLanes / kRegisters; ++l) most = part[l] > most ? part[l] : most;
  }
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
