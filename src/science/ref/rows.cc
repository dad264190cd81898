#include <algorithm>
#include <cmath>
#include <limits>

#include "science/row_kernels.h"

namespace moesaic::graph::ref {
namespace {

float ActivatedValue(float x, Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    case Activation::kRelu:
      return x < 0 ? 0 : x;
    case Activation::kGelu:
      return 0.5F * x * (1 + std::erf(x * 0.70710678F));
    case Activation::kSigmoid:
      return 1 / (1 + std::exp(-x));
    case Activation::kNone:
      break;
  }
  return x;
}

void Activate(const float* const* rows, int count, const float* weights, float scale, int n,
              Activation activation, float* y) {
  for (int i = 0; i < n; ++i) {
    float x = weights != nullptr ? scale * weights[i] : 0;
    for (int r = 0; r < count; ++r) x += rows[r][i];
    y[i] = ActivatedValue(x, activation);
  }
}

float DerivativeAt(float x, Activation activation) {
  const float s = 1 / (1 + std::exp(-x));
  switch (activation) {
    case Activation::kSilu:
      return s * (1 + x * (1 - s));
    case Activation::kRelu:
      return x > 0 ? 1 : 0;
    case Activation::kGelu:
      return 0.5F * (1 + std::erf(x * 0.70710678F)) + x * 0.39894228F * std::exp(-0.5F * x * x);
    case Activation::kSigmoid:
      return s * (1 - s);
    case Activation::kNone:
      break;
  }
  return 1;
}

void ActivateGradient(const float* x, const float* grad, int n, Activation activation, float* out) {
  for (int i = 0; i < n; ++i) out[i] = grad[i] * DerivativeAt(x[i], activation);
}

void LayerNorm(const float* x, const float* gamma, const float* beta, int n, float eps, float* y) {
  float sum = 0, squares = 0;
  for (int i = 0; i < n; ++i) sum += x[i];
  const float mean = sum / static_cast<float>(n);
  for (int i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const float inverse = 1 / std::sqrt(squares / static_cast<float>(n) + eps);
  for (int i = 0; i < n; ++i) {
    y[i] = (x[i] - mean) * inverse * (gamma != nullptr ? gamma[i] : 1) + (beta != nullptr ? beta[i] : 0);
  }
}

void LayerNormGradient(const float* x, const float* gamma, const float* grad, int n, float eps, float* x_grad,
                       float* gamma_grad, float* beta_grad) {
  float sum = 0, squares = 0;
  for (int i = 0; i < n; ++i) sum += x[i];
  const float mean = sum / static_cast<float>(n);
  for (int i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
  const float inverse = 1 / std::sqrt(squares / static_cast<float>(n) + eps);
  float grad_sum = 0, dot = 0;
  for (int i = 0; i < n; ++i) {
    const float normal = (x[i] - mean) * inverse, g = gamma != nullptr ? grad[i] * gamma[i] : grad[i];
    grad_sum += g;
    dot += g * normal;
    if (gamma_grad != nullptr) gamma_grad[i] += grad[i] * normal;
    if (beta_grad != nullptr) beta_grad[i] += grad[i];
  }
  for (int i = 0; i < n; ++i) {
    const float normal = (x[i] - mean) * inverse, g = gamma != nullptr ? grad[i] * gamma[i] : grad[i];
    x_grad[i] += inverse * (g - (grad_sum + normal * dot) / static_cast<float>(n));
  }
}

void Transpose(const float* from, int64_t from_stride, int64_t rows, int64_t cols, float* to,
               int64_t to_stride) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) to[c * to_stride + r] = from[r * from_stride + c];
  }
}

void Gate(const float* x, const float* gate, int n, float* y) {
  for (int i = 0; i < n; ++i) y[i] = x[i] * ActivatedValue(gate[i], Activation::kSigmoid);
}

void SoftmaxRow(float* x, int n) {
  float max = -std::numeric_limits<float>::infinity(), sum = 0;
  for (int i = 0; i < n; ++i) max = std::max(max, x[i]);  // passes over NaN
  if (max == -std::numeric_limits<float>::infinity()) max = 0;
  for (int i = 0; i < n; ++i) sum += x[i] = std::exp(x[i] - max);
  for (int i = 0; i < n && sum != 0; ++i) x[i] /= sum;
}

void ExpRow(float* x, int n) {
  for (int i = 0; i < n; ++i) x[i] = std::exp(x[i]);
}

void Matmul(const MatmulTask& t) {
  for (int64_t i = 0; i < t.m; ++i) {
    for (int64_t j = 0; j < t.n; ++j) {
      float sum = 0;
      for (int64_t k = 0; k < t.k; ++k) {
        sum += t.a[i * t.a_stride + k] * (t.b_transposed ? t.b[j * t.b_stride + k] : t.b[k * t.b_stride + j]);
      }
      float& c = t.c[i * t.c_stride + j];
      c = t.accumulate ? c + sum : sum;
    }
  }
}

}  // namespace

RowKernels Rows() {
  return {Activate,         LayerNorm,        Gate, SoftmaxRow, ExpRow, Matmul, Transpose,
          ActivateGradient, LayerNormGradient};
}

}  // namespace moesaic::graph::ref
