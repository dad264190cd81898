// Micro-kernel interfaces of f32 rows, for layers. See micro_kernels.h for the rules.
#pragma once

#include <cstdint>

namespace moesaic::graph {

/// kGelu is the exact form, with the error function.
enum class Activation : uint8_t { kNone, kSilu, kRelu, kGelu, kSigmoid };

/// y[i] = activation(sum of rows[r][i] + scale * weights[i]); weights may be null. y may be one of the rows.
using ActivateFn = void (*)(const float* const* rows, int count, const float* weights, float scale, int n,
                            Activation activation, float* y);
/// out[i] = grad[i] * activation'(x[i]); out may be x or grad.
using ActivateGradientFn = void (*)(const float* x, const float* grad, int n, Activation activation,
                                    float* out);
/// y = (x - mean) / sqrt(variance + eps) * gamma + beta; gamma and beta may be null. y may be x.
using LayerNormFn = void (*)(const float* x, const float* gamma, const float* beta, int n, float eps,
                             float* y);
/// Adds the gradients of LayerNorm for its result's gradient: x_grad [n] += .., and gamma_grad, beta_grad [n]
/// unless they are null. gamma may be null.
using LayerNormGradientFn = void (*)(const float* x, const float* gamma, const float* grad, int n, float eps,
                                     float* x_grad, float* gamma_grad, float* beta_grad);
/// y[i] = x[i] * sigmoid(gate[i]); y may be x or gate.
using GateFn = void (*)(const float* x, const float* gate, int n, float* y);
/// x = softmax(x). Elements of -inf (masked) become 0, also if all are; one NaN makes the row NaN.
using SoftmaxRowFn = void (*)(float* x, int n);
/// x[i] = e^x[i] for x <= 0; values below -87 give at most 2^-126.
using ExpFn = void (*)(float* x, int n);

/// to[c * to_stride + r] = from[r * from_stride + c] for r < rows, c < cols. Strides are in floats.
using TransposeFn = void (*)(const float* from, int64_t from_stride, int64_t rows, int64_t cols, float* to,
                             int64_t to_stride);

/// c [m, n] = a [m, k] b [k, n], or c += with accumulate; all row-major. With b_transposed b is [n, k].
/// Elements are summed in order of k.
struct MatmulTask {
  const float* a = nullptr;
  const float* b = nullptr;
  float* c = nullptr;
  int64_t a_stride = 0, b_stride = 0, c_stride = 0;  // floats between rows
  int64_t m = 0, n = 0, k = 0;
  bool accumulate = false, b_transposed = false;
  /// Prefetches the next rows of a, also those after its end, while others are used: for rows that follow one
  /// another in memory and are read once. The hardware's prefetchers do not keep up with several rows at a
  /// time.
  bool prefetch_a = false;
};
using MatmulFn = void (*)(const MatmulTask& task);

/// The row kernels of one instruction set.
struct RowKernels {
  ActivateFn activate = nullptr;
  LayerNormFn layer_norm = nullptr;
  GateFn gate = nullptr;
  SoftmaxRowFn softmax = nullptr;
  ExpFn exp = nullptr;
  MatmulFn matmul = nullptr;
  TransposeFn transpose = nullptr;
  ActivateGradientFn activate_gradient = nullptr;
  LayerNormGradientFn layer_norm_gradient = nullptr;
};

namespace cpu {
RowKernels RowKernelsAvx2();
RowKernels RowKernelsAvx512();
}  // namespace cpu
namespace ref {
RowKernels Rows();
}  // namespace ref

}  // namespace moesaic::graph
