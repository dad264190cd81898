#include <immintrin.h>

#include "kernels/cpu/gemm.h"

namespace moesaic::kernels::cpu {
namespace {

inline __m256 LoadUpTo8(const float* x, int count) {
  if (count >= 8) return _mm256_loadu_ps(x);
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_maskload_ps(x, _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lanes));
}

// Packs the low 16 bits of eight lanes, in order; each lane must fit unsigned.
inline __m128i Narrow(__m256i wide) {
  return _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
}

// Compares bits of magnitudes, which are ordered like the magnitudes. Those of infinity and NaN are the
// largest.
inline float LargestMagnitude(const float* x, int k) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i largest = _mm256_setzero_si256();
  for (int i = 0; i < k; i += 8) {
    const __m256i bits = _mm256_castps_si256(LoadUpTo8(x + i, k - i));
    largest = _mm256_max_epi32(largest, _mm256_and_si256(bits, magnitude));
  }
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(largest), _mm256_extracti128_si256(largest, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(m));
}

inline float PrepareI8(const float* x, int k, int k_padded, tensor::StaticScale static_scale, int bias,
                       std::byte* out) {
  const bool is_static = static_scale.is_set();
  const float largest = LargestMagnitude(x, k);
  const float scale = is_static && largest < __builtin_inff() ? static_scale.scale : largest / 127;
  // x / scale with a scale of 0 would be 0 / 0. Such a row is all zeros, or too small for any scale.
  const int valid = scale > 0 ? k : 0;
  const __m256 divisor = _mm256_set1_ps(scale > 0 ? scale : 1), factor = _mm256_set1_ps(static_scale.inverse);
  const __m256i bias8 = _mm256_set1_epi32(bias);
  for (int i = 0; i < k_padded; i += 8) {
    const __m256 value = i < valid ? LoadUpTo8(x + i, valid - i) : _mm256_setzero_ps();
    const __m256 q = is_static ? _mm256_mul_ps(value, factor) : _mm256_div_ps(value, divisor);
    const __m256 clamped = _mm256_min_ps(_mm256_max_ps(q, _mm256_set1_ps(-127)), _mm256_set1_ps(127));
    const __m256i rounded = _mm256_add_epi32(_mm256_cvtps_epi32(clamped), bias8);
    const __m128i words = Narrow(_mm256_and_si256(rounded, _mm256_set1_epi32(0xff)));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out + i), _mm_packus_epi16(words, words));
  }
  return scale;
}

}  // namespace

// Rounds like tensor::ToBF16, including NaN.
float PrepareBF16Avx2(const float* x, int k, int k_padded, tensor::StaticScale /*static_scale*/,
                      std::byte* out) {
  const __m256i one = _mm256_set1_epi32(1);
  for (int i = 0; i < k_padded; i += 8) {
    const __m256 value = i < k ? LoadUpTo8(x + i, k - i) : _mm256_setzero_ps();
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i chosen = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * i), Narrow(chosen));
  }
  return 0;
}

float PrepareS8Avx2(const float* x, int k, int k_padded, tensor::StaticScale static_scale, std::byte* out) {
  return PrepareI8(x, k, k_padded, static_scale, 0, out);
}

float PrepareU8Avx2(const float* x, int k, int k_padded, tensor::StaticScale static_scale, std::byte* out) {
  return PrepareI8(x, k, k_padded, static_scale, 128, out);
}

}  // namespace moesaic::kernels::cpu
