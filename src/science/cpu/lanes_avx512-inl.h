// Additions to kernels/cpu/simd_avx512-inl.h: 16-bit floats and comparisons.
#pragma once

#include "kernels/cpu/simd_avx512-inl.h"

namespace moesaic::graph::cpu {
namespace {

using namespace moesaic::kernels;  // NOLINT: lanes are in its anonymous namespace

constexpr int kRegisters = 32;  // vector registers of the instruction set

/// Stores to an aligned address past the caches; see Fence().
inline void Stream(float* p, V x) { _mm512_stream_ps(p, x); }
/// Orders stores of Stream() before all later ones.
inline void Fence() { _mm_sfence(); }
inline V LoadF16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void StoreF16(uint16_t* p, V x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
/// Rounds to nearest, ties to even; keeps NaN a NaN.
inline void StoreBf16(uint16_t* p, V x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, rounded, quiet)));
}

/// Replaces lanes of *best, and of *arg by id, where x is larger, or NaN while *best is not.
inline void MaxStep(V x, VI id, V* best, VI* arg) {
  const __mmask16 take =
      _mm512_cmp_ps_mask(x, *best, _CMP_NLE_UQ) & _mm512_cmp_ps_mask(*best, *best, _CMP_ORD_Q);
  *best = _mm512_mask_blend_ps(take, *best, x);
  *arg = _mm512_mask_blend_epi32(take, *arg, id);
}
inline V Negate(V x) {
  return _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(x), SetInts(INT32_MIN)));
}
/// Returns x where a and b are equal, otherwise 0.
inline V KeepEqual(VI a, VI b, V x) { return _mm512_maskz_mov_ps(_mm512_cmpeq_epi32_mask(a, b), x); }
/// The low half of `low` and the high half of `high`.
inline V JoinHalves(V low, V high) { return _mm512_mask_blend_ps(0xff00, low, high); }
inline V LoadHalfTwice(const float* p) {
  return _mm512_castpd_ps(_mm512_broadcast_f64x4(_mm256_loadu_pd(reinterpret_cast<const double*>(p))));
}
inline void StoreHalves(float* low, float* high, V x) {
  _mm256_storeu_ps(low, _mm512_castps512_ps256(x));
  _mm256_storeu_pd(reinterpret_cast<double*>(high), _mm512_extractf64x4_pd(_mm512_castps_pd(x), 1));
}
inline VI LoadFirstInts(const int32_t* p, int n) { return _mm512_maskz_loadu_epi32(FirstLanes(n), p); }
inline void StoreFirstInts(int32_t* p, VI x, int n) { _mm512_mask_storeu_epi32(p, FirstLanes(n), x); }
inline float MaxLanes(V x) {
  x = Max(x, Swap<8>(x));
  x = Max(x, Swap<4>(x));
  x = Max(x, Swap<2>(x));
  x = Max(x, Swap<1>(x));
  return First(x);
}

}  // namespace
}  // namespace moesaic::graph::cpu
