#include <immintrin.h>

#include "kernels/cpu/gemm.h"

namespace moesaic::kernels::cpu {
namespace {

inline __mmask16 Mask(int left) {
  return left >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1U << left) - 1U);
}

}  // namespace

// Rounds like tensor::ToBF16, including NaN; vcvtneps2bf16 would flush denormals.
float PrepareBF16Avx512(const float* x, int k, int k_padded, tensor::StaticScale /*static_scale*/,
                        std::byte* out) {
  const __m512i one = _mm512_set1_epi32(1);
  for (int i = 0; i < k_padded; i += 16) {
    const __mmask16 mask = i < k ? Mask(k - i) : static_cast<__mmask16>(0);
    const __m512 value = _mm512_maskz_loadu_ps(mask, x + i);
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __m512i chosen = _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 2 * i), _mm512_cvtepi32_epi16(chosen));
  }
  return 0;
}

float PrepareU8Avx512(const float* x, int k, int k_padded, tensor::StaticScale static_scale, std::byte* out) {
  const bool is_static = static_scale.is_set();
  // Bits of magnitudes are ordered like the magnitudes. Those of infinity and NaN are the largest.
  __m512i bits = _mm512_setzero_si512();
  for (int i = 0; i < k; i += 16) {
    const __m512 magnitudes = _mm512_abs_ps(_mm512_maskz_loadu_ps(Mask(k - i), x + i));
    bits = _mm512_max_epi32(bits, _mm512_castps_si512(magnitudes));
  }
  const float largest = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epi32(bits))));
  const float scale = is_static && largest < __builtin_inff() ? static_scale.scale : largest / 127;
  // x / scale with a scale of 0 would be 0 / 0. Such a row is all zeros, or too small for any scale.
  const __m512 divisor = _mm512_set1_ps(scale > 0 ? scale : 1), factor = _mm512_set1_ps(static_scale.inverse);
  const __m512i bias = _mm512_set1_epi32(128);
  for (int i = 0; i < k_padded; i += 16) {
    const __mmask16 mask = i < k && scale > 0 ? Mask(k - i) : static_cast<__mmask16>(0);
    const __m512 value = _mm512_maskz_loadu_ps(mask, x + i);
    const __m512 q = is_static ? _mm512_mul_ps(value, factor) : _mm512_div_ps(value, divisor);
    const __m512 clamped = _mm512_min_ps(_mm512_max_ps(q, _mm512_set1_ps(-127)), _mm512_set1_ps(127));
    const __m512i rounded = _mm512_add_epi32(_mm512_cvtps_epi32(clamped), bias);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm512_cvtepi32_epi8(rounded));
  }
  return scale;
}

}  // namespace moesaic::kernels::cpu
