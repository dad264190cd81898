#include "layers/moe.h"

#include <algorithm>

#include "kernels/elementwise.h"
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

// Added to the choice score of an expert that is left out. It is finite, so that kernels order these experts
// among themselves.
constexpr float kLeftOut = -1e30F;

// Experts that are left out are chosen only where too few others are eligible.
void DropWeights(const Router& router, int rows, const int32_t* ids, float* weights) {
  for (int row = 0; row < rows; ++row, ids += router.top_k, weights += router.top_k) {
    float sum = 0;
    bool drops = false;
    for (int i = 0; i < router.top_k; ++i) {
      const bool left_out = router.left_out_bias[ids[i]] == kLeftOut;
      drops |= left_out;
      if (left_out) weights[i] = 0;
      sum += weights[i];
    }
    if (!drops || !router.normalize || sum <= 0) continue;
    for (int i = 0; i < router.top_k; ++i) weights[i] *= router.scale / sum;
  }
}

// Weights that other ranks can use: with static scales or several images, the records are not all of them.
parallel::BatchSplit::Weights Sendable(const kernels::ExpertWeights& experts) {
  if (experts.stride == 0 || experts.input_scales != nullptr || experts.gate.images > 1) return {};
  return {.data = RecordsOf(experts), .bytes = experts.stride};
}

}  // namespace

const std::byte* RecordsOf(const kernels::ExpertWeights& experts) {
  return std::min({experts.gate.data, experts.up.data, experts.down.data});
}

kernels::ExpertWeights WithRecords(kernels::ExpertWeights experts, const std::byte* records, int count) {
  const std::byte* const old = RecordsOf(experts);
  for (tensor::PackedMatrix* matrix : {&experts.gate, &experts.up, &experts.down}) {
    matrix->data = records + (matrix->data - old);
  }
  experts.count = count;
  return experts;
}

void Router::LeaveOut(std::span<const int> experts) {
  left_out_bias.clear();
  if (experts.empty()) return;
  left_out_bias.assign(gate.n(), 0.0F);
  if (choice_bias != nullptr) std::copy_n(choice_bias, gate.n(), left_out_bias.begin());
  for (const int expert : experts) left_out_bias[expert] = kLeftOut;
}

void Router::Route(const Step& step, const float* x, int32_t* ids, float* weights) const {
  ScratchScope scratch(step.ctx);
  const int rows = step.rows();
  auto* logits = scratch.Take<float>(static_cast<int64_t>(rows) * gate.n());
  Apply(step.ctx, gate, x, gate.k(), rows, logits, gate.n());
  kernels::Route(step.ctx, {.logits = logits,
                            .bias = left_out_bias.empty() ? choice_bias : left_out_bias.data(),
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
  if (!left_out_bias.empty()) DropWeights(*this, rows, ids, weights);
}

void MoeLayer::AddShared(const Step& step, const float* x, float* out) const {
  const Mlp shared{
      .gate = {shared_gate}, .up = {shared_up}, .down = {shared_down}, .hidden = router.gate.k()};
  shared.Forward(step, x, out, /*accumulate=*/true);
}

// Adds the choices of the routers to the counters that the step has.
void MoeLayer::Count(const Step& step, const int32_t* ids) const {
  const int rows = step.rows();
  if (step.expert_load != nullptr) {
    int64_t* load = step.expert_load + static_cast<int64_t>(index) * router.gate.n();
    for (int64_t i = 0; i < int64_t{rows} * router.top_k; ++i) ++load[ids[i]];
  }
  if (step.experts_read != nullptr) {
    *step.experts_read += CountExperts(step, ids, int64_t{rows} * router.top_k, router.gate.n());
  }
  if (step.routes != nullptr) {
    step.routes->layers.push_back(
        {.top_k = router.top_k, .ids = std::vector<int32_t>(ids, ids + int64_t{rows} * router.top_k)});
  }
}

// After a failure, which the groups keep, the output is void.
void MoeLayer::Exchange(const Step& step, parallel::ExpertGroup& group, const float* x, const int32_t* ids,
                        const float* weights, float* out) const {
  const Status exchanged = ExchangeRows(step, group, x, ids, weights, out);
  if (exchanged.ok()) return;
  std::fill_n(out, static_cast<int64_t>(step.rows()) * router.gate.k(), 0.0F);
  step.groups->Fail(exchanged);
}

// Writes the outputs of rows [first, end) of `received` to their places in `y`. The rank of the token applies
// its weights.
void MoeLayer::ComputeRows(const Step& step, const parallel::ExpertGroup::Rows& received, int first, int end,
                           const kernels::ExpertWeights& of, float* y) const {
  if (first == end) return;
  ScratchScope scratch(step.ctx);
  const int hidden = router.gate.k();
  auto* ones = scratch.Take<float>(end - first);
  std::fill_n(ones, end - first, 1.0F);
  kernels::Moe(step.ctx, {.x = received.x + int64_t{first} * hidden,
                          .x_stride = hidden,
                          .rows = end - first,
                          .hidden = hidden,
                          .intermediate = of.gate.n(),
                          .experts = of,
                          .ids = received.expert.data() + first,
                          .weights = ones,
                          .top_k = 1,
                          .shared_gate = {},
                          .shared_up = {},
                          .shared_down = {},
                          .out = y + int64_t{first} * hidden,
                          .out_stride = hidden});
}

// The shards of a replica have the same rows and send a part of them each. So the output is a partial sum
// over the shards, as that of the shared experts is.
Status MoeLayer::ExchangeRows(const Step& step, parallel::ExpertGroup& group, const float* x,
                              const int32_t* ids, const float* weights, float* out) const {
  ScratchScope scratch(step.ctx);
  const int hidden = router.gate.k();
  const parallel::Range own = group.OwnRows(step.rows());
  const auto first = static_cast<int64_t>(own.first), count = static_cast<int64_t>(own.count);
  const auto values = static_cast<size_t>(count * hidden),
             choices = static_cast<size_t>(count * router.top_k);
  RETURN_IF_ERROR(group.Begin(index, {x + first * hidden, values}, {ids + first * router.top_k, choices},
                              {weights + first * router.top_k, choices}, Sendable(experts)));
  std::fill_n(out, static_cast<int64_t>(step.rows()) * hidden, 0.0F);
  if (!shared_gate.empty() && step.rows() > 0) AddShared(step, x, out);  // while rows travel
  ASSIGN_OR_RETURN(const parallel::ExpertGroup::Rows received, group.Receive());
  const int64_t outputs = int64_t{received.count} * hidden;
  auto* y = scratch.Take<float>(outputs);
  ComputeRows(step, received, 0, received.own, experts, y);
  if (received.spilled != nullptr && received.own < received.count) {
    ComputeRows(step, received, received.own, received.count,
                WithRecords(experts, received.spilled, received.expert.back() + 1), y);
  }
  auto* routed = scratch.Take<float>(count * hidden);
  RETURN_IF_ERROR(group.Combine({y, static_cast<size_t>(outputs)}, {routed, values}));
  if (count > 0) kernels::Add(step.ctx, routed, count * hidden, out + first * hidden);
  return OkStatus();
}

void MoeLayer::Forward(const Step& step, const float* x, float* out,
                       const kernels::ColumnParts& parts) const {
  ScratchScope scratch(step.ctx);
  const int rows = step.rows();
  const int hidden = router.gate.k();
  auto* ids = scratch.Take<int32_t>(static_cast<int64_t>(rows) * router.top_k);
  auto* weights = scratch.Take<float>(static_cast<int64_t>(rows) * router.top_k);
  if (rows > 0) router.Route(step, x, ids, weights);
  Count(step, ids);
  if (step.groups != nullptr && step.groups->experts() != nullptr) {
    Exchange(step, *step.groups->experts(), x, ids, weights, out);
    return parts.DoneAll(hidden);
  }
  if (!local_expert.empty()) {
    for (int64_t i = 0; i < int64_t{rows} * router.top_k; ++i) ids[i] = local_expert[ids[i]];
  }
  if (experts.count == 0) {
    std::fill_n(out, static_cast<int64_t>(rows) * hidden, 0.0F);
    if (!shared_gate.empty()) AddShared(step, x, out);
    return parts.DoneAll(hidden);
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
                          .out_stride = hidden,
                          .parts = parts});
}

}  // namespace moesaic::layers
