// Shared by the AVX-512 GEMM kernels: the last step from accumulators to C.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/gemm_blocks-inl.h"

namespace moesaic::kernels::cpu {
namespace {

/// Stores 16 outputs of one row with bias and accumulation; columns outside of the matrix are not written.
inline void StoreRow512(const GemmTile& t, int row, int panel, __m512 value) {
  const int columns = ColumnsOf(t, panel);
  const auto mask = static_cast<__mmask16>((1U << columns) - 1U);
  if (t.bias != nullptr) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, t.bias + 16 * panel));
  float* c = t.c + row * t.c_stride + 16 * panel;
  if (t.accumulate) value = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, c), value);
  if (columns == 16) {
    _mm512_storeu_ps(c, value);
  } else {
    _mm512_mask_storeu_ps(c, mask, value);
  }
}

/// Widens 32 bf16 to f32.
inline void Widen32(const std::byte* from, float* to) {
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + h);
    const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
    _mm512_store_ps(to + 16 * h, _mm512_castsi512_ps(wide));
  }
}

/// Returns the excess of dots with biased activations in a panel: 128 sum(w).
inline __m512i BiasOf512(const GemmTile& t, int panel) {
  return _mm512_slli_epi32(_mm512_loadu_si512(t.w_sums + 16 * panel), 7);
}

/// Scales dots of biased activations, sum((a + 128) w), with the expression of all int8 kernels: float(dot) *
/// (a_scale * w_scale).
inline __m512 ScaleDots512(__m512i dots, __m512i bias, float a_scale, __m512 w_scales) {
  const __m512 exact = _mm512_cvtepi32_ps(_mm512_sub_epi32(dots, bias));
  return _mm512_mul_ps(exact, _mm512_mul_ps(_mm512_set1_ps(a_scale), w_scales));
}

/// Stores dots of biased activations to C.
inline void StoreBiasedDots512(const GemmTile& t, int row, int panel, __m512i dots) {
  StoreRow512(
      t, row, panel,
      ScaleDots512(dots, BiasOf512(t, panel), t.a_scales[row], _mm512_loadu_ps(t.w_scales + 16 * panel)));
}

}  // namespace
}  // namespace moesaic::kernels::cpu
