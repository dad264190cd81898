#include "kernels/cpu/elementwise.h"
#include "kernels/cpu/simd_avx2-inl.h"
// Requires the lanes included above:
#include "kernels/cpu/elementwise-inl.h"

namespace moesaic::kernels::cpu {

void RmsNormAvx2(const float* x, const float* weight, int n, float eps, float* y) {
  RmsNormRow(x, weight, n, eps, y);
}
void SiluMulAvx2(const float* gate, const float* up, int n, float* y) { SiluMulRow(gate, up, n, y); }
void AxpyAvx2(float scale, const float* x, int n, float* y) { AxpyRow(scale, x, n, y); }

void AxpbyAvx2(float a, const float* x, float b, int n, float* y) { AxpbyRow(a, x, b, n, y); }
void RopeHalfAvx2(float* x, const float* cos, const float* sin, int dim) { RopeHalfRow(x, cos, sin, dim); }
void RopeInterleavedAvx2(float* x, const float* cos, const float* sin, int dim) {
  RopeInterleavedRow(x, cos, sin, dim);
}

}  // namespace moesaic::kernels::cpu
