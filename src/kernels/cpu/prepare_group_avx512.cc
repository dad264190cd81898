#include <immintrin.h>

#include "kernels/cpu/gemm_group.h"
#include "kernels/cpu/gemm_group_formats-inl.h"

namespace moesaic::kernels::cpu {
namespace {

inline __mmask16 Mask(int left) {
  if (left <= 0) return 0;
  return left >= 16 ? static_cast<__mmask16>(0xffff) : static_cast<__mmask16>((1U << left) - 1U);
}

// Rounds 16 values to codes in [-127, 127], as 32-bit integers.
inline __m512i Round(__m512 x, __m512 scale, __mmask16 valid) {
  const __m512 q = _mm512_maskz_div_ps(valid, x, scale);
  const __m512 clamped = _mm512_min_ps(_mm512_max_ps(q, _mm512_set1_ps(-127)), _mm512_set1_ps(127));
  return _mm512_cvtps_epi32(clamped);
}

template <typename Format>
inline float Prepare(const float* x, int k, int k_padded, std::byte* out) {
  auto* scales = reinterpret_cast<float*>(out + k_padded);
  std::byte* corrections = out + k_padded + k_padded / 8;
  for (int i = 0; i < k_padded; i += kActivationGroup) {
    const __mmask16 mask0 = Mask(k - i), mask1 = Mask(k - i - 16);
    const __m512 x0 = _mm512_maskz_loadu_ps(mask0, x + i);
    const __m512 x1 = _mm512_maskz_loadu_ps(mask1, x + i + 16);
    // Bits of magnitudes are ordered like the magnitudes. Those of infinity and NaN are the largest.
    const __m512i m0 = _mm512_castps_si512(_mm512_abs_ps(x0)), m1 = _mm512_castps_si512(_mm512_abs_ps(x1));
    const int largest = _mm512_reduce_max_epi32(_mm512_max_epi32(m0, m1));
    const float scale = _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(largest))) / 127;
    scales[i / kActivationGroup] = scale;
    const __m512 divisor = _mm512_set1_ps(scale);
    const bool valid = scale > 0;
    const __m512i q0 = Round(x0, divisor, valid ? mask0 : static_cast<__mmask16>(0));
    const __m512i q1 = Round(x1, divisor, valid ? mask1 : static_cast<__mmask16>(0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm512_cvtepi32_epi8(q0));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i + 16), _mm512_cvtepi32_epi8(q1));
    if constexpr (Format::kGroup == 32) {
      StoreCorrection<Format>(_mm512_reduce_add_epi32(_mm512_add_epi32(q0, q1)), scale, i / 32, corrections);
    } else {
      StoreCorrection<Format>(_mm512_reduce_add_epi32(q0), scale, i / 16, corrections);
      StoreCorrection<Format>(_mm512_reduce_add_epi32(q1), scale, i / 16 + 1, corrections);
    }
  }
  return 0;
}

}  // namespace

float PrepareI8G32Avx512(const float* x, int k, int k_padded, tensor::StaticScale /*static_scale*/,
                         std::byte* out) {
  return Prepare<I8G32>(x, k, k_padded, out);
}
float PrepareI4G32Avx512(const float* x, int k, int k_padded, tensor::StaticScale /*static_scale*/,
                         std::byte* out) {
  return Prepare<I4G32>(x, k, k_padded, out);
}
float PrepareMxfp4Avx512(const float* x, int k, int k_padded, tensor::StaticScale /*static_scale*/,
                         std::byte* out) {
  return Prepare<Mxfp4>(x, k, k_padded, out);
}
float PrepareNvfp4Avx512(const float* x, int k, int k_padded, tensor::StaticScale /*static_scale*/,
                         std::byte* out) {
  return Prepare<Nvfp4>(x, k, k_padded, out);
}
float PrepareQ4KAvx512(const float* x, int k, int k_padded, tensor::StaticScale /*static_scale*/,
                       std::byte* out) {
  return Prepare<Q4K>(x, k, k_padded, out);
}
float PrepareQ6KAvx512(const float* x, int k, int k_padded, tensor::StaticScale /*static_scale*/,
                       std::byte* out) {
  return Prepare<Q6K>(x, k, k_padded, out);
}

}  // namespace moesaic::kernels::cpu
