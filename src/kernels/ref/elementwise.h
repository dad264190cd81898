// Reference implementations of the elementwise micro-kernels: the oracle of their tests, and the fallback on
// processors without the others' instruction sets.
#pragma once

namespace moesaic::kernels::ref {

void RmsNorm(const float* x, const float* weight, int n, float eps, float* y);
void SiluMul(const float* gate, const float* up, int n, float* y);
void Axpy(float scale, const float* x, int n, float* y);
void Axpby(float a, const float* x, float b, int n, float* y);
void RopeHalf(float* x, const float* cos, const float* sin, int dim);
void RopeInterleaved(float* x, const float* cos, const float* sin, int dim);
void Rescale(float* x, int n, int halvings);

}  // namespace moesaic::kernels::ref
