// A dense SwiGLU feed-forward network (arXiv 2002.05202).
#pragma once

#include "layers/linear.h"

namespace moesaic::layers {

/// With several ranks, each rank has some columns of the hidden layer, or none; its matrices are then empty
/// and its output is zero.
struct Mlp {
  Linear gate, up, down;
  int hidden = 0;

  /// Sets out [rows, hidden] = down(silu(gate(x)) * up(x)), or adds to it with `accumulate`; x is [rows,
  /// hidden]. `parts` are those of `out`.
  void Forward(const Step& step, const float* x, float* out, bool accumulate,
               const kernels::ColumnParts& parts = {}) const;
  /// Computes Forward() without down: gated [rows, gate.n()] = silu(gate(x)) * up(x).
  void Gated(const Step& step, const float* x, float* gated) const;
};

}  // namespace moesaic::layers
