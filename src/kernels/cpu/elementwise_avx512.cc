#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/simd_avx512-inl.h"
// Requires the lanes included above:
#include "kernels/cpu/elementwise-inl.h"

namespace moesaic::kernels::cpu {

void RmsNormAvx512(const float* x, const float* weight, int n, float eps, float* y) {
  RmsNormRow(x, weight, n, eps, y);
}
void SiluMulAvx512(const float* gate, const float* up, int n, float* y) { SiluMulRow(gate, up, n, y); }
void AxpyAvx512(float scale, const float* x, int n, float* y) { AxpyRow(scale, x, n, y); }

void AxpbyAvx512(float a, const float* x, float b, int n, float* y) { AxpbyRow(a, x, b, n, y); }
void RopeHalfAvx512(float* x, const float* cos, const float* sin, int dim) { RopeHalfRow(x, cos, sin, dim); }
void RopeInterleavedAvx512(float* x, const float* cos, const float* sin, int dim) {
  RopeInterleavedRow(x, cos, sin, dim);
}

void RescaleAvx512(float* x, int n, int halvings) {
  const int steps = halvings < 255 ? halvings : 255;  // no exponent survives more
  const __m512i exponent = _mm512_set1_epi32(0x7f800000), down = _mm512_set1_epi32(steps << 23);
  for (int i = 0; i < n; i += kLanes) {
    const __mmask16 lanes = n - i < kLanes ? FirstLanes(n - i) : static_cast<__mmask16>(0xffff);
    const __m512i bits = _mm512_maskz_loadu_epi32(lanes, x + i);
    const __m512i e = _mm512_and_si512(bits, exponent);
    const __mmask16 finite = _mm512_cmpneq_epi32_mask(e, exponent);
    // normal after rescaling; numbers that were not normal have e = 0
    const __mmask16 normal = _mm512_cmpgt_epu32_mask(e, down);
    const __m512i scaled = _mm512_maskz_sub_epi32(normal, bits, down);
    _mm512_mask_storeu_epi32(x + i, lanes, _mm512_mask_mov_epi32(bits, finite, scaled));
  }
}

}  // namespace moesaic::kernels::cpu
