// Gated attention along the rows or the columns of a matrix of features, with its gradients: the common part
// of triangle attention and of attention over an alignment.
#pragma once

#include "science/evoformer.h"

namespace moesaic::science {

/// x [outer, inner, c] += out(sigmoid(gate(n)) * attend(q(n), k(n), v(n))) for n = norm(x), along its inner
/// positions or along its outer ones.
struct AxialAttention {
  const GatedHeads& mha;
  const Norm& norm;
  int64_t outer, inner;
  bool along_outer;
  const float* bias;  // [heads, positions, positions] or null
  const float* mask;  // [outer, inner] or null

  int64_t rows() const { return outer * inner; }
  int c() const { return mha.q.k(); }
  int width() const { return mha.heads * mha.dim; }
  /// Operands are arrays [rows, width].
  PairAttentionParams Params(const float* q, const float* k, const float* v, float* out) const;
};

/// Arrays to which Backward() adds gradients; a null one is not computed.
struct AxialGradients {
  DenseGradients q{}, k{}, v{}, gate{}, out{};
  NormGradients norm{};
  float* x = nullptr;
  float* bias = nullptr;  ///< [heads, positions, positions]

  /// Looks the parameters of the heads up, and those of the norm by its name.
  Status Find(const GradientScope& scope, const AxialAttention& attention, const std::string& norm_name);
};
/// Adds the gradients for out_grad [rows, c], that of x after the layer; x is the layer's input. Four arrays
/// [rows, width] exist at once.
void AxialBackward(const graph::Context& ctx, const AxialAttention& attention, const float* x,
                   const float* out_grad, const AxialGradients& out);

/// out [heads, rows of x] = linear(norm(x)) transposed: the bias of attention.
void ComputeBias(const graph::Context& ctx, const Norm& norm, const Dense& linear, const float* x,
                 int64_t rows, float* out);
/// Adds the gradients of ComputeBias() for out_grad [heads, rows].
void BiasBackward(const graph::Context& ctx, const Norm& norm, const Dense& linear, const float* x,
                  int64_t rows, const float* out_grad, const DenseGradients& linear_grads,
                  const NormGradients& norm_grads, float* x_grad);

/// Transposes `count` squares x [n, n] in place.
void TransposeSquares(const graph::Context& ctx, int64_t count, int64_t n, float* x);

}  // namespace moesaic::science
