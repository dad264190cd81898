// Layers of AlphaFold 2's Evoformer (Jumper et al., Nature 596, 2021, supplementary algorithms 7 to 15), with
// the parameter names of OpenFold. Activations are f32: m [sequences, residues, c_m] and z [residues,
// residues, c_z]. Every layer adds its update to its argument.
#pragma once

#include "science/dense_gradient.h"
#include "science/pair_attention.h"

namespace moesaic::science {

/// Projections of multi-head attention with a gate: linear_q, linear_k, linear_v, linear_g, linear_o.
struct GatedHeads {
  Dense q, k, v, gate, out;
  int heads = 0, dim = 0;
  static StatusOr<GatedHeads> Load(const WeightScope& weights, int heads);
};

/// Algorithms 11 and 12: z_ij += gate * linear(norm(sum_k a_ik b_jk)), or a_ki b_kj for incoming edges.
class TriangleMultiplication {
 public:
  static StatusOr<TriangleMultiplication> Load(const WeightScope& weights, bool incoming);
  int c() const { return a_.k(); }  ///< Channels of z.
  /// mask is [n, n] or null.
  Status Run(const graph::Context& ctx, int64_t n, const float* mask, float* z) const;
  /// Adds the gradients for out_grad [n, n, c], that of z after the layer, to z_grad [n, n, c] (or null) and
  /// to `parameters`, which has the names of the state dict. z is the layer's input. Projections are computed
  /// again; three arrays [hidden, n, n] and two [n, n] per thread exist at once.
  Status Backward(const graph::Context& ctx, int64_t n, const float* mask, const float* z,
                  const float* out_grad, float* z_grad, const GradientMap& parameters) const;

 private:
  struct BackwardRun;
  bool incoming_ = false;
  Norm norm_in_, norm_out_;
  Dense a_, a_gate_, b_, b_gate_, gate_, out_;
};

/// Algorithms 13 and 14: attention along rows of z (starting node) or columns (ending node), biased by z.
class TriangleAttention {
 public:
  static StatusOr<TriangleAttention> Load(const WeightScope& weights, int heads, bool ending);
  int c() const { return mha_.q.k(); }  ///< Channels of z.
  Status Run(const graph::Context& ctx, int64_t n, const float* mask, float* z) const;
  /// Adds gradients as TriangleMultiplication::Backward() does. Weights of the softmax are computed again for
  /// 48 queries at a time.
  Status Backward(const graph::Context& ctx, int64_t n, const float* mask, const float* z,
                  const float* out_grad, float* z_grad, const GradientMap& parameters) const;

 private:
  // The bias [heads, n, n] of attention.
  void SquareBias(const graph::Context& ctx, int64_t n, const float* z, float* bias) const;

  bool ending_ = false;
  Norm norm_;
  Dense bias_;
  GatedHeads mha_;
};

/// Algorithms 7 and 8: attention along the rows of m, biased by z, or along its columns.
class MsaAttention {
 public:
  /// Row attention if the weights have linear_z, otherwise column attention.
  static StatusOr<MsaAttention> Load(const WeightScope& weights, int heads);
  int c_m() const { return mha_.q.k(); }
  int c_z() const { return bias_.empty() ? 0 : bias_.k(); }  ///< 0 for column attention.
  /// mask is [sequences, residues] or null. z is read by row attention only.
  Status Run(const graph::Context& ctx, int64_t sequences, int64_t residues, const float* mask,
             const float* z, float* m) const;
  /// Adds the gradients for out_grad, that of m after the layer, to m_grad, z_grad (row attention) and
  /// `parameters`; m is the layer's input. m_grad and z_grad may be null.
  Status Backward(const graph::Context& ctx, int64_t sequences, int64_t residues, const float* mask,
                  const float* z, const float* m, const float* out_grad, float* z_grad, float* m_grad,
                  const GradientMap& parameters) const;

 private:
  Norm norm_, norm_z_;
  Dense bias_;
  GatedHeads mha_;
};

/// Algorithm 10: z_ij += linear(mean over sequences of a_si outer b_sj), without storing the outer products.
class OuterProductMean {
 public:
  static StatusOr<OuterProductMean> Load(const WeightScope& weights);
  int c_m() const { return a_.k(); }
  int c_z() const { return out_.n(); }
  Status Run(const graph::Context& ctx, int64_t sequences, int64_t residues, const float* mask,
             const float* m, float* z) const;
  /// Adds the gradients for out_grad [residues, residues, c_z], that of z after the layer, to m_grad (or
  /// null) and `parameters`. The gradient of z is out_grad. Outer products are computed again for 32 pairs at
  /// a time.
  Status Backward(const graph::Context& ctx, int64_t sequences, int64_t residues, const float* mask,
                  const float* m, const float* out_grad, float* m_grad, const GradientMap& parameters) const;

 private:
  struct Operands;
  // Projections of m, times the mask.
  Operands Project(const graph::Context& ctx, int64_t sequences, int64_t residues, const float* mask,
                   const float* m) const;

  Norm norm_;
  Dense a_, b_, out_;
};

/// Algorithms 9 and 15: x += linear(relu(linear(norm(x)))) for rows of x.
class Transition {
 public:
  static StatusOr<Transition> Load(const WeightScope& weights);
  int c() const { return in_.k(); }  ///< Channels of x.
  Status Run(const graph::Context& ctx, int64_t rows, float* x) const;
  /// Adds the gradients for out_grad [rows, c], that of x after the layer, to x_grad [rows, c] (or null) and
  /// `parameters`. x is the layer's input. Hidden values are computed again for 2048 rows at a time.
  Status Backward(const graph::Context& ctx, int64_t rows, const float* x, const float* out_grad,
                  float* x_grad, const GradientMap& parameters) const;

 private:
  Norm norm_;
  Dense in_, out_;
};

/// Gradients of a block's results, and arrays to which those of its inputs are added; null: not computed.
struct EvoformerGradients {
  const float* m_out = nullptr;  ///< [sequences, residues, c_m]
  const float* z_out = nullptr;  ///< [residues, residues, c_z]
  float *m = nullptr, *z = nullptr;
};

/// Algorithm 6, one block. Scopes: msa_att_row, msa_att_col, msa_transition, outer_product_mean, tri_mul_out,
/// tri_mul_in, tri_att_start, tri_att_end, pair_transition.
class EvoformerBlock {
 public:
  /// Fails if the layers disagree on the channels of m or z.
  static StatusOr<EvoformerBlock> Load(const WeightScope& weights, int msa_heads, int pair_heads);
  int c_m() const { return row_.c_m(); }
  int c_z() const { return outgoing_.c(); }
  Status Run(const graph::Context& ctx, int64_t sequences, int64_t residues, const float* msa_mask,
             const float* pair_mask, float* m, float* z) const;
  /// Adds the gradients for grads.m_out and grads.z_out, those of m and z after the block, to grads.m,
  /// grads.z and `parameters`; m and z are the block's inputs. The inputs of all layers are computed again:
  /// five arrays of the size of m and seven of the size of z exist at once, and those of one layer's backward
  /// pass.
  Status Backward(const graph::Context& ctx, int64_t sequences, int64_t residues, const float* msa_mask,
                  const float* pair_mask, const float* m, const float* z, const EvoformerGradients& grads,
                  const GradientMap& parameters) const;

 private:
  MsaAttention row_, column_;
  Transition msa_transition_, pair_transition_;
  OuterProductMean outer_;
  TriangleMultiplication outgoing_, incoming_;
  TriangleAttention starting_, ending_;
};

}  // namespace moesaic::science
