// Additions to kernels/cpu/simd_avx2-inl.h: 16-bit floats and comparisons.
#pragma once

#include "kernels/cpu/simd_avx2-inl.h"

namespace moesaic::graph::cpu {
namespace {

using namespace moesaic::kernels;  // NOLINT: lanes are in its anonymous namespace

constexpr int kRegisters = 16;  // vector registers of the instruction set

/// Stores to an aligned address past the caches; see Fence().
inline void Stream(float* p, V x) { _mm256_stream_ps(p, x); }
/// Orders stores of Stream() before all later ones.
inline void Fence() { _mm_sfence(); }
inline V LoadF16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void StoreF16(uint16_t* p, V x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
/// Rounds to nearest, ties to even; keeps NaN a NaN.
inline void StoreBf16(uint16_t* p, V x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i wide = _mm256_blendv_epi8(rounded, quiet, nan);
  const __m256i narrow = _mm256_permute4x64_epi64(_mm256_packus_epi32(wide, wide), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(narrow));
}

/// Replaces lanes of *best, and of *arg by id, where x is larger, or NaN while *best is not.
inline void MaxStep(V x, VI id, V* best, VI* arg) {
  const V take = _mm256_and_ps(_mm256_cmp_ps(x, *best, _CMP_NLE_UQ), _mm256_cmp_ps(*best, *best, _CMP_ORD_Q));
  *best = _mm256_blendv_ps(*best, x, take);
  *arg = _mm256_blendv_epi8(*arg, id, _mm256_castps_si256(take));
}
inline V Negate(V x) { return _mm256_xor_ps(x, Set(-0.0F)); }
/// Returns x where a and b are equal, otherwise 0.
inline V KeepEqual(VI a, VI b, V x) {
  return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(a, b)));
}
/// The low half of `low` and the high half of `high`.
inline V JoinHalves(V low, V high) { return _mm256_blend_ps(low, high, 0xf0); }
inline V LoadHalfTwice(const float* p) { return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p)); }
inline void StoreHalves(float* low, float* high, V x) {
  _mm_storeu_ps(low, _mm256_castps256_ps128(x));
  _mm_storeu_ps(high, _mm256_extractf128_ps(x, 1));
}
inline VI LoadFirstInts(const int32_t* p, int n) { return _mm256_maskload_epi32(p, FirstLanes(n)); }
inline void StoreFirstInts(int32_t* p, VI x, int n) { _mm256_maskstore_epi32(p, FirstLanes(n), x); }
inline float MaxLanes(V x) {
  x = Max(x, Swap<4>(x));
  x = Max(x, Swap<2>(x));
  x = Max(x, Swap<1>(x));
  return First(x);
}

}  // namespace
}  // namespace moesaic::graph::cpu
