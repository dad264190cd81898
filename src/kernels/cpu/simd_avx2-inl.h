// Eight float lanes, for kernels written once over this file and simd_avx512-inl.h. Everything is in an
// anonymous namespace on purpose: a file compiled for one instruction set must not share symbols (see
// impl_list.h).
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/exp_constants.h"

namespace moesaic::kernels {
namespace {

using V = __m256;
constexpr int kLanes = 8;

inline V Zero() { return _mm256_setzero_ps(); }
inline V Set(float x) { return _mm256_set1_ps(x); }
inline V Add(V a, V b) { return _mm256_add_ps(a, b); }
inline V Sub(V a, V b) { return _mm256_sub_ps(a, b); }
inline V Mul(V a, V b) { return _mm256_mul_ps(a, b); }
inline V Div(V a, V b) { return _mm256_div_ps(a, b); }
inline V Fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }      // a * b + c
inline V NegFma(V a, V b, V c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a * b
inline V Max(V a, V b) { return _mm256_max_ps(a, b); }                // returns b if either is NaN
inline V Min(V a, V b) { return _mm256_min_ps(a, b); }                // returns b if either is NaN
inline V Abs(V x) { return _mm256_andnot_ps(Set(-0.0F), x); }

inline V Load(const float* p) { return _mm256_loadu_ps(p); }
/// Loads eight bfloat16, whose bits are the upper half of a float's.
inline V Load(const uint16_t* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
/// Loads eight int8.
inline V Load(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
/// Loads eight uint8.
inline V Load(const uint8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
/// Keeps a loaded value in a register where the compiler would reload it for every product: with two loads
/// per cycle, loads would limit a loop of FMAs.
inline V InRegister(V x) {
  asm("" : "+x"(x));
  return x;
}
inline void Store(float* p, V x) { _mm256_storeu_ps(p, x); }

/// Repeats four floats in every 128 bits.
inline V RepeatFour(const float* p) { return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)); }

/// Selects the first n < 8 lanes; others read as zero and are not written.
inline __m256i FirstLanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline V LoadFirst(const float* p, int n) { return _mm256_maskload_ps(p, FirstLanes(n)); }
inline void StoreFirst(float* p, V x, int n) { _mm256_maskstore_ps(p, FirstLanes(n), x); }

/// Returns a where index < limit (compared as signed integers), otherwise b.
using VI = __m256i;
inline VI LoadInts(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline VI AddInts(VI a, VI b) { return _mm256_add_epi32(a, b); }
inline VI SetInts(int32_t x) { return _mm256_set1_epi32(x); }
inline void StoreInts(int32_t* p, VI x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
inline V ToFloats(VI x) { return _mm256_cvtepi32_ps(x); }
inline VI ToInts(V x) { return _mm256_cvtps_epi32(x); }  // to the nearest
inline V AsFloats(VI bits) { return _mm256_castsi256_ps(bits); }
inline VI AsInts(V x) { return _mm256_castps_si256(x); }
template <int kBits>
inline VI ShiftLeft(VI x) {
  return _mm256_slli_epi32(x, kBits);
}
template <int kBits>
inline VI ShiftRight(VI x) {  // arithmetic shift
  return _mm256_srai_epi32(x, kBits);
}
/// Operations on bytes and 16-bit integers, 4 or 2 per lane.
inline VI LoadBytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void StoreBytes(void* p, VI x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
inline VI SetBytes(int8_t x) { return _mm256_set1_epi8(x); }
inline VI SetShorts(int16_t x) { return _mm256_set1_epi16(x); }
inline VI And(VI a, VI b) { return _mm256_and_si256(a, b); }
inline VI AddShorts(VI a, VI b) { return _mm256_add_epi16(a, b); }
template <int kBits>
inline VI ShiftShortsRight(VI x) {
  return _mm256_srli_epi16(x, kBits);
}
/// Loads 16 bytes each from two addresses `stride` bytes apart; or 8 bytes each, followed by zeros.
inline VI LoadParts(const void* from, int64_t stride) {
  const auto* p = static_cast<const std::byte*>(from);
  const VI x = _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_inserti128_si256(x, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + stride)), 1);
}
inline VI LoadHalfParts(const void* from, int64_t stride) {
  const auto* p = static_cast<const std::byte*>(from);
  const VI x = _mm256_castsi128_si256(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm256_inserti128_si256(x, _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + stride)), 1);
}
/// Interleave the 16-bit elements, or bytes, of a and b from the lower or upper half of every 128 bits.
inline VI MixLowShorts(VI a, VI b) { return _mm256_unpacklo_epi16(a, b); }
inline VI MixHighShorts(VI a, VI b) { return _mm256_unpackhi_epi16(a, b); }
inline VI MixLowBytes(VI a, VI b) { return _mm256_unpacklo_epi8(a, b); }
inline VI MixHighBytes(VI a, VI b) { return _mm256_unpackhi_epi8(a, b); }
/// Sums of two adjacent products: of bytes, unsigned by signed, and of 16-bit integers.
inline VI MultiplyBytes(VI a, VI b) { return _mm256_maddubs_epi16(a, b); }
inline VI MultiplyShorts(VI a, VI b) { return _mm256_madd_epi16(a, b); }
/// Lane i is lane index[i] of x.
inline V Pick(V x, VI index) { return _mm256_permutevar8x32_ps(x, index); }
inline V SelectLess(VI index, VI limit, V a, V b) {
  return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(_mm256_cmpgt_epi32(limit, index)));
}
inline V SelectNegative(V x, V a, V b) {
  return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, Zero(), _CMP_LT_OQ));
}

/// Exchanges lane i with lane i ^ kDistance.
template <int kDistance>
inline V Swap(V x) {
  if constexpr (kDistance == 4) return _mm256_permute2f128_ps(x, x, 0x01);
  if constexpr (kDistance == 2) return _mm256_permute_ps(x, 0x4e);
  if constexpr (kDistance == 1) return _mm256_permute_ps(x, 0xb1);
}

inline float First(V x) { return _mm256_cvtss_f32(x); }
inline float SumLanes(V x) {
  x = Add(x, Swap<4>(x));
  x = Add(x, Swap<2>(x));
  x = Add(x, Swap<1>(x));
  return First(x);
}

inline V SumFourIn128(const V* x) {  // in both 128-bit halves, element i is the sum of that half of x[i]
  const V ab = Add(_mm256_unpacklo_ps(x[0], x[1]), _mm256_unpackhi_ps(x[0], x[1]));
  const V cd = Add(_mm256_unpacklo_ps(x[2], x[3]), _mm256_unpackhi_ps(x[2], x[3]));
  const __m256d lo = _mm256_unpacklo_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
  const __m256d hi = _mm256_unpackhi_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
  return Add(_mm256_castpd_ps(lo), _mm256_castpd_ps(hi));
}

/// Lane i is the sum of the lanes of x[i], added in the same order for every i.
inline V SumEach(const V* x) {
  const V a = SumFourIn128(x);
  const V b = SumFourIn128(x + 4);
  return Add(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

/// p * 2^n for integral n in [-126, 127].
inline V Scale(V p, V n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return Mul(p, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
inline V Round(V x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

/// Rotates the interleaved pairs of x by angles; c and s point to their cosines and sines, one per pair.
inline V RotatePairs(V x, const float* c, const float* s) {
  const __m256i twice = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
  const V cc = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(c)), twice);
  const V ss = _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(s)), twice);
  return _mm256_fmaddsub_ps(x, cc, Mul(Swap<1>(x), ss));  // even: x c - y s; odd: y c + x s
}

}  // namespace
}  // namespace moesaic::kernels

#include "kernels/cpu/exp-inl.h"
