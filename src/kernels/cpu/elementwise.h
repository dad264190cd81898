// Elementwise micro-kernels of each instruction set; micro_kernels.h documents them.
#pragma once

#include "kernels/micro_kernels.h"

namespace moesaic::kernels::cpu {

void RmsNormAvx2(const float* x, const float* weight, int n, float eps, float* y);
void SiluMulAvx2(const float* gate, const float* up, int n, float* y);
void AxpyAvx2(float scale, const float* x, int n, float* y);
void AxpbyAvx2(float a, const float* x, float b, int n, float* y);
void RopeHalfAvx2(float* x, const float* cos, const float* sin, int dim);
void RopeInterleavedAvx2(float* x, const float* cos, const float* sin, int dim);

void RmsNormAvx512(const float* x, const float* weight, int n, float eps, float* y);
void SiluMulAvx512(const float* gate, const float* up, int n, float* y);
void AxpyAvx512(float scale, const float* x, int n, float* y);
void AxpbyAvx512(float a, const float* x, float b, int n, float* y);
void RopeHalfAvx512(float* x, const float* cos, const float* sin, int dim);
void RopeInterleavedAvx512(float* x, const float* cos, const float* sin, int dim);
void RescaleAvx512(float* x, int n, int halvings);

}  // namespace moesaic::kernels::cpu
