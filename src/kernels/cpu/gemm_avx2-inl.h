// Shared by the AVX2 GEMM kernels: the last step from accumulators to C. A panel's 16 outputs are two
// registers.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/gemm_blocks-inl.h"

namespace moesaic::kernels::cpu {
namespace {

/// Stores outputs [8 half, 8 half + 8) of `panel` of one row; columns outside of the matrix are not written.
inline void StoreHalf256(const GemmTile& t, int row, int panel, int half, __m256 value) {
  const int first = 16 * panel + 8 * half;
  const int columns = t.columns - first;
  if (columns <= 0) return;
  float* c = t.c + row * t.c_stride + first;
  if (columns >= 8) {
    if (t.bias != nullptr) value = _mm256_add_ps(value, _mm256_loadu_ps(t.bias + first));
    if (t.accumulate) value = _mm256_add_ps(_mm256_loadu_ps(c), value);
    _mm256_storeu_ps(c, value);
    return;
  }
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(columns), lanes);
  if (t.bias != nullptr) value = _mm256_add_ps(value, _mm256_maskload_ps(t.bias + first, mask));
  if (t.accumulate) value = _mm256_add_ps(_mm256_maskload_ps(c, mask), value);
  _mm256_maskstore_ps(c, mask, value);
}

/// Widens 32 bf16 to f32.
inline void Widen32(const std::byte* from, float* to) {
  for (int i = 0; i < 4; ++i) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
    const __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16);
    _mm256_store_ps(to + 8 * i, _mm256_castsi256_ps(wide));
  }
}

/// Stores exact dots to C with the expression of all int8 kernels: float(dot) * (a_scale * w_scale).
inline void StoreDots256(const GemmTile& t, int row, int panel, int half, __m256i dots) {
  const __m256 w_scales = _mm256_loadu_ps(t.w_scales + 16 * panel + 8 * half);
  const __m256 scale = _mm256_mul_ps(_mm256_set1_ps(t.a_scales[row]), w_scales);
  StoreHalf256(t, row, panel, half, _mm256_mul_ps(_mm256_cvtepi32_ps(dots), scale));
}

}  // namespace
}  // namespace moesaic::kernels::cpu
