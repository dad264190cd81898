#include "kernels/ref/elementwise.h"

#include <cmath>
#include <limits>

namespace moesaic::kernels::ref {
namespace {

void Rotate(float* a, float* b, float cos, float sin) {
  const float x = *a, y = *b;
  *a = x * cos - y * sin;
  *b = y * cos + x * sin;
}

}  // namespace

void RmsNorm(const float* x, const float* weight, int n, float eps, float* y) {
  double sum = 0;
  for (int i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * x[i];
  const auto inverse = static_cast<float>(1 / std::sqrt(sum / n + eps));
  for (int i = 0; i < n; ++i) y[i] = x[i] * inverse * weight[i];
}

void SiluMul(const float* gate, const float* up, int n, float* y) {
  for (int i = 0; i < n; ++i) y[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
}

void Axpy(float scale, const float* x, int n, float* y) {
  for (int i = 0; i < n; ++i) y[i] += scale * x[i];
}

void Axpby(float a, const float* x, float b, int n, float* y) {
  for (int i = 0; i < n; ++i) y[i] = a * x[i] + b * y[i];
}

void RopeHalf(float* x, const float* cos, const float* sin, int dim) {
  const int half = dim / 2;
  for (int i = 0; i < half; ++i) Rotate(&x[i], &x[i + half], cos[i], sin[i]);
}

void RopeInterleaved(float* x, const float* cos, const float* sin, int dim) {
  for (int i = 0; i < dim / 2; ++i) Rotate(&x[2 * i], &x[2 * i + 1], cos[i], sin[i]);
}

void Rescale(float* x, int n, int halvings) {
  for (int i = 0; i < n; ++i) {
    if (!std::isfinite(x[i])) continue;
    const double scaled = std::ldexp(double{x[i]}, -halvings);  // exact
    const bool normal = std::isnormal(x[i]) && std::abs(scaled) >= std::numeric_limits<float>::min();
    x[i] = normal ? static_cast<float>(scaled) : 0;
  }
}

}  // namespace moesaic::kernels::ref
