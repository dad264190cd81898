// Invariant point attention of AlphaFold 2 (Jumper et al., Nature 596, 2021, supplementary algorithm 22),
// with the parameter names of OpenFold.
#pragma once

#include "science/dense_gradient.h"

namespace moesaic::science {

/// A rigid transform per residue: x -> rotation x + translation.
struct Frames {
  const float* rotation;     ///< [n, 3, 3], row-major
  const float* translation;  ///< [n, 3]
};

/// Output buffers to which gradients of the inputs are added; null: not computed.
struct InvariantPointGradients {
  float* s = nullptr;            ///< [n, c_s]
  float* z = nullptr;            ///< [n, n, c_z]
  float* rotation = nullptr;     ///< [n, 3, 3]
  float* translation = nullptr;  ///< [n, 3]
};

struct InvariantPointOptions {
  int heads = 12, dim = 16, query_points = 4, value_points = 8;
};

/// Attention over residues with scalar, point and pair terms. One pass reads each row of z once for the bias
/// and the pair output; squared distances of points become products, so that no [n, n, heads, points] array
/// exists.
class InvariantPointAttention {
 public:
  /// Parameters linear_q, linear_kv, linear_q_points, linear_kv_points, linear_b, head_weights, linear_out.
  static StatusOr<InvariantPointAttention> Load(const WeightScope& weights,
                                                const InvariantPointOptions& options);
  int c_s() const { return q_.k(); }
  int c_z() const { return bias_.k(); }
  const InvariantPointOptions& options() const { return options_; }
  /// out [n, c_s] for s [n, c_s] and z [n, n, c_z]; mask is [n] (0: padding) or null. pair_bias is the result
  /// of PairBias() for this z, or null: then it is computed.
  Status Run(const graph::Context& ctx, int64_t n, const float* s, const float* z, const Frames& frames,
             const float* mask, float* out, const float* pair_bias = nullptr) const;
  /// bias[i, h, j] = sqrt(1/3) linear_b(z_ij)_h: [n, heads, n]. A stack whose layers share weights and z
  /// computes it once.
  void PairBias(const graph::Context& ctx, int64_t n, const float* z, float* bias) const;
  /// Adds the gradients for out_grad [n, c_s]. Weights of the softmax are computed again and exist as two
  /// arrays [n, heads, n]. `parameters` has the names of the state dict.
  Status Backward(const graph::Context& ctx, int64_t n, const float* s, const float* z, const Frames& frames,
                  const float* mask, const float* out_grad, const InvariantPointGradients& out,
                  const GradientMap& parameters) const;

 private:
  struct State;
  struct BackwardRun;
  void Project(const graph::Context& ctx, int64_t n, const float* s, const Frames& frames,
               State* state) const;
  void Attend(const graph::Context& ctx, int64_t n, const float* z, const float* mask, const float* pair_bias,
              const State& state) const;
  // Adds the bias of row z [n, c_z] to scores [heads, n]. `buffer` has 2 n heads floats.
  void AddBias(const graph::Context& ctx, int64_t n, const float* z, float* buffer, float* scores) const;

  InvariantPointOptions options_;
  Dense q_, kv_, q_points_, kv_points_, bias_, out_;
  std::vector<float> bias_rows_, bias_shift_;  // linear_b times sqrt(1/3): [c_z, heads], [heads]
  std::vector<float> point_weights_;           // [heads]: softplus of head_weights times the constants
};

}  // namespace moesaic::science
