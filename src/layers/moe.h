// A mixture-of-experts layer: a router and the experts it chooses, shared experts among them.
#pragma once

#include "layers/linear.h"

namespace moesaic::layers {

/// Chooses experts and their weights, in f32 whatever the experts are stored in.
struct Router {
  Linear gate;                         // [experts, hidden]
  const float* choice_bias = nullptr;  // [experts] or null
  int top_k = 0;
  kernels::RouteParams::Scoring scoring{};
  kernels::RouteParams::GroupScore group_score{};
  int groups = 1, top_groups = 1;
  bool normalize = false;
  float scale = 1;

  /// ids and weights are [rows, top_k].
  void Route(const Step& step, const float* x, int32_t* ids, float* weights) const;
};

struct MoeLayer {
  Router router;
  kernels::ExpertWeights experts;
  tensor::PackedMatrix shared_gate, shared_up, shared_down;  // empty: no shared expert

  /// out [rows, hidden] is written; x is [rows, hidden].
  void Forward(const Step& step, const float* x, float* out) const;
};

}  // namespace moesaic::layers
