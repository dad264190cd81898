#include <immintrin.h>

#include "kernels/cpu/gemm_group.h"
#include "kernels/cpu/gemm_group_formats-inl.h"

namespace moesaic::kernels::cpu {
namespace {

inline __m256 LoadUpTo8(const float* x, int count) {
  if (count >= 8) return _mm256_loadu_ps(x);
  if (count <= 0) return _mm256_setzero_ps();
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_maskload_ps(x, _mm256_cmpgt_epi32(_mm256_set1_epi32(count), lanes));
}

// Returns the largest magnitude of the given bits of magnitudes.
inline float Largest(__m256i bits) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
  return _mm_cvtss_f32(_mm_castsi128_ps(m));
}

inline int Sum(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
  return _mm_cvtsi128_si32(s);
}

template <typename Format>
inline float Prepare(const float* x, int k, int k_padded, std::byte* out) {
  auto* scales = reinterpret_cast<float*>(out + k_padded);
  std::byte* corrections = out + k_padded + k_padded / 8;
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  for (int i = 0; i < k_padded; i += kActivationGroup) {
    __m256 value[4];
    // Bits of magnitudes are ordered like the magnitudes. Those of infinity and NaN are the largest.
    __m256i largest = _mm256_setzero_si256();
    for (int j = 0; j < 4; ++j) {
      value[j] = LoadUpTo8(x + i + 8 * j, k - i - 8 * j);
      largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(value[j]), magnitude));
    }
    const float scale = Largest(largest) / 127;
    scales[i / kActivationGroup] = scale;
    const __m256 divisor = _mm256_set1_ps(scale > 0 ? scale : 1);
    int sums[4];
    for (int j = 0; j < 4; ++j) {
      const __m256 q = _mm256_div_ps(scale > 0 ? value[j] : _mm256_setzero_ps(), divisor);
      const __m256 clamped = _mm256_min_ps(_mm256_max_ps(q, _mm256_set1_ps(-127)), _mm256_set1_ps(127));
      const __m256i rounded = _mm256_cvtps_epi32(clamped);
      sums[j] = Sum(rounded);
      const __m128i words =
          _mm_packs_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(out + i + 8 * j), _mm_packs_epi16(words, words));
    }
    if constexpr (Format::kGroup == 32) {
      StoreCorrection<Format>(sums[0] + sums[1] + sums[2] + sums[3], scale, i / 32, corrections);
    } else {
      StoreCorrection<Format>(sums[0] + sums[1], scale, i / 16, corrections);
      StoreCorrection<Format>(sums[2] + sums[3], scale, i / 16 + 1, corrections);
    }
  }
  return 0;
}

}  // namespace

float PrepareI8G32Avx2(const float* x, int k, int k_padded, tensor::StaticScale /*static_scale*/,
                       std::byte* out) {
  return Prepare<I8G32>(x, k, k_padded, out);
}
float PrepareI4G32Avx2(const float* x, int k, int k_padded, tensor::StaticScale /*static_scale*/,
                       std::byte* out) {
  return Prepare<I4G32>(x, k, k_padded, out);
}
float PrepareMxfp4Avx2(const float* x, int k, int k_padded, tensor::StaticScale /*static_scale*/,
                       std::byte* out) {
  return Prepare<Mxfp4>(x, k, k_padded, out);
}
float PrepareNvfp4Avx2(const float* x, int k, int k_padded, tensor::StaticScale /*static_scale*/,
                       std::byte* out) {
  return Prepare<Nvfp4>(x, k, k_padded, out);
}
float PrepareQ4KAvx2(const float* x, int k, int k_padded, tensor::StaticScale /*static_scale*/,
                     std::byte* out) {
  return Prepare<Q4K>(x, k, k_padded, out);
}
float PrepareQ6KAvx2(const float* x, int k, int k_padded, tensor::StaticScale /*static_scale*/,
                     std::byte* out) {
  return Prepare<Q6K>(x, k, k_padded, out);
}

}  // namespace moesaic::kernels::cpu
