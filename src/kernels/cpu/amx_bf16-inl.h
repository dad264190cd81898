// Prepares bfloat16 for AMX tiles, with the lanes of simd_avx512-inl.h, which must be included first.
#pragma once

#include "kernels/cpu/amx_tiles-inl.h"
#include "kernels/cpu/columns-inl.h"

namespace moesaic::kernels::cpu {
namespace {

constexpr int kStep = 32;  // bfloat16 values in a row of a tile

/// Compiler barrier: earlier stores must precede tile loads, which GCC does not know to read memory.
inline void Written() { __asm__ volatile("" : : : "memory"); }

/// Rounds to the nearest bfloat16, in the upper half of each lane. NaNs with all 16 bits after the sign
/// set, which x86 does not make, become 0 or -0.
inline __m512i UpperBF16(V x) {
  const __m512i rounded = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
  return _mm512_and_si512(rounded, _mm512_set1_epi32(static_cast<int>(0xffff0000U)));
}
inline V RoundingError(V x, __m512i upper) { return Sub(x, _mm512_castsi512_ps(upper)); }

/// Lane i holds the bfloat16 of `even` below that of `odd`.
inline __m512i Pairs(__m512i even, __m512i odd) { return _mm512_or_si512(_mm512_srli_epi32(even, 16), odd); }

/// Converts 32 floats that are exact in bfloat16.
inline __m512i Narrow(V a, V b) {
  alignas(64) static constexpr uint16_t kUpper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                      23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                      45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return _mm512_permutex2var_epi16(_mm512_castps_si512(a), _mm512_load_si512(kUpper), _mm512_castps_si512(b));
}

/// Loads 32 floats and separates even and odd dimensions.
inline void LoadPairs(const float* p, V* even, V* odd) {
  const __m512i evens = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odds = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  const V a = Load(p), b = Load(p + 16);
  *even = _mm512_permutex2var_ps(a, evens, b);
  *odd = _mm512_permutex2var_ps(a, odds, b);
}

/// Converts sixteen int8 to floats; a float's upper half holds them exactly.
inline __m512i Widen(__m128i x) { return _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x))); }

}  // namespace
}  // namespace moesaic::kernels::cpu
