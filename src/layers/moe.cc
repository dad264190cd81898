#include "layers/moe.h"

#include <algorithm>

#include "layers/mlp.h"

namespace moesaic::layers {
namespace {

// Counts distinct ids.
int64_t CountExperts(const Step& step, const int32_t* ids, int64_t count, int experts) {
  ScratchScope scratch(step.ctx);
  auto* used = scratch.Take<uint8_t>(experts);
  std::fill_n(used, experts, uint8_t{0});
  for (int64_t i = 0; i < count; ++i) used[ids[i]] = 1;
  return std::count(used, used + experts, uint8_t{1});
}

}  // namespace

void Router::Route(const Step& step, const float* x, int32_t* ids, float* weights) const {
  ScratchScope scratch(step.ctx);
  const int rows = step.rows();
  auto* logits = scratch.Take<float>(static_cast<int64_t>(rows) * gate.n());
  Apply(step.ctx, gate, x, gate.k(), rows, logits, gate.n());
  kernels::Route(step.ctx, {.logits = logits,
                            .bias = choice_bias,
                            .rows = rows,
                            .experts = gate.n(),
                            .top_k = top_k,
                            .scoring = scoring,
                            .groups = groups,
                            .top_groups = top_groups,
                            .group_score = group_score,
                            .normalize = normalize,
                            .scale = scale,
                            .ids = ids,
                            .weights = weights});
}

void MoeLayer::AddShared(const Step& step, const float* x, float* out) const {
  const Mlp shared{
      .gate = {shared_gate}, .up = {shared_up}, .down = {shared_down}, .hidden = router.gate.k()};
  shared.Forward(step, x, out, /*accumulate=*/true);
}

void MoeLayer::Forward(const Step& step, const float* x, float* out) const {
  ScratchScope scratch(step.ctx);
  const int rows = step.rows();
  const int hidden = router.gate.k();
  auto* ids = scratch.Take<int32_t>(static_cast<int64_t>(rows) * router.top_k);
  auto* weights = scratch.Take<float>(static_cast<int64_t>(rows) * router.top_k);
  router.Route(step, x, ids, weights);
  if (step.experts_read != nullptr) {
    *step.experts_read += CountExperts(step, ids, int64_t{rows} * router.top_k, router.gate.n());
  }
  if (step.routes != nullptr) {
    step.routes->layers.push_back(
        {.top_k = router.top_k, .ids = std::vector<int32_t>(ids, ids + int64_t{rows} * router.top_k)});
  }
  if (!local_expert.empty()) {
    for (int64_t i = 0; i < int64_t{rows} * router.top_k; ++i) ids[i] = local_expert[ids[i]];
  }
  if (experts.count == 0) {
    std::fill_n(out, static_cast<int64_t>(rows) * hidden, 0.0F);
    if (!shared_gate.empty()) AddShared(step, x, out);
    return;
  }
  kernels::Moe(step.ctx, {.x = x,
                          .x_stride = hidden,
                          .rows = rows,
                          .hidden = hidden,
                          .intermediate = experts.gate.n(),
                          .experts = experts,
                          .ids = ids,
                          .weights = weights,
                          .top_k = router.top_k,
                          .shared_gate = shared_gate,
                          .shared_up = shared_up,
                          .shared_down = shared_down,
                          .shared_intermediate = shared_gate.empty() ? 0 : shared_gate.n(),
                          .out = out,
                          .out_stride = hidden});
}

}  // namespace moesaic::layers
