// Invariant point attention of AlphaFold 2 (Jumper et al., Nature 596, 2021, supplementary algorithm 22),
// with the parameter names of OpenFold.
#pragma once

#include "science/weights.h"

namespace moesaic::science {

/// A rigid transform per residue: x -> rotation x + translation.
struct Frames {
  const float* rotation;     ///< [n, 3, 3], row-major
  const float* translation;  ///< [n, 3]
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
  /// out [n, c_s] for s [n, c_s] and z [n, n, c_z]; mask is [n] (0: padding) or null.
  Status Run(const graph::Context& ctx, int64_t n, const float* s, const float* z, const Frames& frames,
             const float* mask, float* out) const;

 private:
  InvariantPointOptions options_;
  Dense q_, kv_, q_points_, kv_points_, bias_, out_;
  std::vector<float> point_weights_;  // [heads]: softplus of head_weights times the constants
};

}  // namespace moesaic::science
