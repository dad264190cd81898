// Sixteen float lanes, for kernels written once over this file and simd_avx2-inl.h. Everything is in an
// anonymous namespace on purpose: a file compiled for one instruction set must not share symbols (see
// impl_list.h).
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/exp_constants.h"

namespace moesaic::kernels {
namespace {

using V = __m512;
constexpr int kLanes = 16;

inline V Zero() { return _mm512_setzero_ps(); }
inline V Set(float x) { return _mm512_set1_ps(x); }
inline V Add(V a, V b) { return _mm512_add_ps(a, b); }
inline V Sub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V Mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V Div(V a, V b) { return _mm512_div_ps(a, b); }
inline V Fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }      // a * b + c
inline V NegFma(V a, V b, V c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
inline V Max(V a, V b) { return _mm512_max_ps(a, b); }                // returns b if either is NaN
inline V Min(V a, V b) { return _mm512_min_ps(a, b); }                // returns b if either is NaN
inline V Abs(V x) { return _mm512_abs_ps(x); }

inline V Load(const float* p) { return _mm512_loadu_ps(p); }
/// Loads sixteen bfloat16, whose bits are the upper half of a float's.
inline V Load(const uint16_t* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
/// Loads sixteen int8.
inline V Load(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
/// Loads sixteen uint8.
inline V Load(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
/// Keeps a loaded value in a register where the compiler would reload it for every product: with two loads
/// per cycle, loads would limit a loop of FMAs.
inline V InRegister(V x) {
  asm("" : "+v"(x));
  return x;
}
inline void Store(float* p, V x) { _mm512_storeu_ps(p, x); }

/// Repeats four floats in every 128 bits.
inline V RepeatFour(const float* p) { return _mm512_broadcast_f32x4(_mm_loadu_ps(p)); }

/// Selects the first n < 16 lanes; others read as zero and are not written.
inline __mmask16 FirstLanes(int n) { return static_cast<__mmask16>((1U << n) - 1); }
inline V LoadFirst(const float* p, int n) { return _mm512_maskz_loadu_ps(FirstLanes(n), p); }
inline V LoadFirst(const uint16_t* p, int n) {
  const __m256i bits = _mm256_maskz_loadu_epi16(FirstLanes(n), p);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline V LoadFirst(const int8_t* p, int n) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(FirstLanes(n), p)));
}
inline V LoadFirst(const uint8_t* p, int n) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(FirstLanes(n), p)));
}
inline void StoreFirst(float* p, V x, int n) { _mm512_mask_storeu_ps(p, FirstLanes(n), x); }

/// Returns a where index < limit (compared as signed integers), otherwise b.
using VI = __m512i;
inline VI LoadInts(const int32_t* p) { return _mm512_loadu_si512(p); }
inline VI AddInts(VI a, VI b) { return _mm512_add_epi32(a, b); }
inline VI SetInts(int32_t x) { return _mm512_set1_epi32(x); }
inline void StoreInts(int32_t* p, VI x) { _mm512_storeu_si512(p, x); }
inline V ToFloats(VI x) { return _mm512_cvtepi32_ps(x); }
inline VI ToInts(V x) { return _mm512_cvtps_epi32(x); }  // to the nearest
inline V AsFloats(VI bits) { return _mm512_castsi512_ps(bits); }
inline VI AsInts(V x) { return _mm512_castps_si512(x); }
template <int kBits>
inline VI ShiftLeft(VI x) {
  return _mm512_slli_epi32(x, kBits);
}
template <int kBits>
inline VI ShiftRight(VI x) {  // arithmetic shift
  return _mm512_srai_epi32(x, kBits);
}
/// Operations on bytes and 16-bit integers, 4 or 2 per lane.
inline VI LoadBytes(const void* p) { return _mm512_loadu_si512(p); }
inline void StoreBytes(void* p, VI x) { _mm512_storeu_si512(p, x); }
inline VI SetBytes(int8_t x) { return _mm512_set1_epi8(x); }
inline VI SetShorts(int16_t x) { return _mm512_set1_epi16(x); }
inline VI And(VI a, VI b) { return _mm512_and_si512(a, b); }
inline VI AddShorts(VI a, VI b) { return _mm512_add_epi16(a, b); }
template <int kBits>
inline VI ShiftShortsRight(VI x) {
  return _mm512_srli_epi16(x, kBits);
}
/// Loads 16 bytes each from four addresses `stride` bytes apart; or 8 bytes each, followed by zeros.
inline VI LoadParts(const void* from, int64_t stride) {
  const auto* p = static_cast<const std::byte*>(from);
  VI x = _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  x = _mm512_inserti32x4(x, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + stride)), 1);
  x = _mm512_inserti32x4(x, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 2 * stride)), 2);
  return _mm512_inserti32x4(x, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 3 * stride)), 3);
}
inline VI LoadHalfParts(const void* from, int64_t stride) {
  const auto* p = static_cast<const std::byte*>(from);
  VI x = _mm512_castsi128_si512(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  x = _mm512_inserti32x4(x, _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + stride)), 1);
  x = _mm512_inserti32x4(x, _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 2 * stride)), 2);
  return _mm512_inserti32x4(x, _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 3 * stride)), 3);
}
/// Interleave the 16-bit elements, or bytes, of a and b from the lower or upper half of every 128 bits.
inline VI MixLowShorts(VI a, VI b) { return _mm512_unpacklo_epi16(a, b); }
inline VI MixHighShorts(VI a, VI b) { return _mm512_unpackhi_epi16(a, b); }
inline VI MixLowBytes(VI a, VI b) { return _mm512_unpacklo_epi8(a, b); }
inline VI MixHighBytes(VI a, VI b) { return _mm512_unpackhi_epi8(a, b); }
/// Sums of two adjacent products: of bytes, unsigned by signed, and of 16-bit integers.
inline VI MultiplyBytes(VI a, VI b) { return _mm512_maddubs_epi16(a, b); }
inline VI MultiplyShorts(VI a, VI b) { return _mm512_madd_epi16(a, b); }
/// Lane i is lane index[i] of x.
inline V Pick(V x, VI index) { return _mm512_permutexvar_ps(index, x); }
inline V SelectLess(VI index, VI limit, V a, V b) {
  return _mm512_mask_blend_ps(_mm512_cmplt_epi32_mask(index, limit), b, a);
}
inline V SelectNegative(V x, V a, V b) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, Zero(), _CMP_LT_OQ), b, a);
}

/// Exchanges lane i with lane i ^ kDistance.
template <int kDistance>
inline V Swap(V x) {
  if constexpr (kDistance == 8) return _mm512_shuffle_f32x4(x, x, 0x4e);
  if constexpr (kDistance == 4) return _mm512_shuffle_f32x4(x, x, 0xb1);
  if constexpr (kDistance == 2) return _mm512_permute_ps(x, 0x4e);
  if constexpr (kDistance == 1) return _mm512_permute_ps(x, 0xb1);
}

inline float First(V x) { return _mm512_cvtss_f32(x); }
inline float SumLanes(V x) {
  x = Add(x, Swap<8>(x));
  x = Add(x, Swap<4>(x));
  x = Add(x, Swap<2>(x));
  x = Add(x, Swap<1>(x));
  return First(x);
}

/// Transposes sixteen rows of sixteen.
inline void Transpose(VI* r) {
  __m512i a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
    a[4 + i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
    a[8 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
    a[12 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0xdd);
    r[4 + i] = _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0xdd);
  }
}

inline V AddEvenOdd128(V a, V b) {  // [a.0+a.1, a.2+a.3, b.0+b.1, b.2+b.3] of 128-bit parts
  return Add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
inline V SumFourIn128(const V* x) {  // in every 128-bit part, element i is the sum of that part of x[i]
  const V ab = Add(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  const V cd = Add(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  const __m512d lo = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d hi = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  return Add(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));
}

/// Lane i is the sum of the lanes of x[i], added in the same order for every i.
inline V SumEach(const V* x) {
  return AddEvenOdd128(AddEvenOdd128(SumFourIn128(x), SumFourIn128(x + 4)),
                       AddEvenOdd128(SumFourIn128(x + 8), SumFourIn128(x + 12)));
}

/// p * 2^n for integral n; overflows to infinity and underflows gradually.
inline V Scale(V p, V n) { return _mm512_scalef_ps(p, n); }
inline V Round(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

/// Rotates the interleaved pairs of x by angles; c and s point to their cosines and sines, one per pair.
inline V RotatePairs(V x, const float* c, const float* s) {
  const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  const V cc = _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_loadu_ps(c)));
  const V ss = _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_loadu_ps(s)));
  return _mm512_fmaddsub_ps(x, cc, Mul(Swap<1>(x), ss));  // even: x c - y s; odd: y c + x s
}

}  // namespace
}  // namespace moesaic::kernels

#include "kernels/cpu/exp-inl.h"
