// A dense SwiGLU feed-forward network (arXiv 2002.05202).
#pragma once

#include "layers/linear.h"

namespace moesaic::layers {

struct Mlp {
  Linear gate, up, down;

  /// Sets out [rows, hidden] = down(silu(gate(x)) * up(x)), or adds to it with `accumulate`; x is [rows,
  /// hidden].
  void Forward(const Step& step, const float* x, float* out, bool accumulate) const;
  /// Computes Forward() without down: gated [rows, gate.n()] = silu(gate(x)) * up(x).
  void Gated(const Step& step, const float* x, float* gated) const;
};

}  // namespace moesaic::layers
