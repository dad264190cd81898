#include "layers/attention_gqa.h"

#include "kernels/block_sparsity.h"
#include "kernels/elementwise.h"
#include "layers/attend_chosen.h"

namespace moesaic::layers {
namespace {

void NormHeads(const kernels::ExecContext& ctx, const float* weight, float eps, float* x, int heads,
               int dim) {
  if (weight == nullptr) return;
  kernels::RmsNorm(ctx, {.x = x,
                         .x_stride = dim,
                         .weight = weight,
                         .y = x,
                         .y_stride = dim,
                         .rows = heads,
                         .n = dim,
                         .eps = eps});
}

}  // namespace

void GqaAttention::Mix(const Step& step, const float* x, const kernels::KvLayer& kv, float* mixed) const {
  ScratchScope scratch(step.ctx);
  const int rows = step.rows();
  const int q_dim = heads * head_dim;
  const int kv_dim = kv_heads * head_dim;
  auto* queries = scratch.Take<float>(static_cast<int64_t>(rows) * q_dim);
  auto* keys = scratch.Take<float>(static_cast<int64_t>(rows) * kv_dim);
  auto* values = scratch.Take<float>(static_cast<int64_t>(rows) * kv_dim);
  const LinearOutput projections[] = {{&q, queries, q_dim}, {&k, keys, kv_dim}, {&v, values, kv_dim}};
  ApplyGroup(step.ctx, projections, x, q.k(), rows);
  NormHeads(step.ctx, q_norm, norm_eps, queries, rows * heads, head_dim);
  NormHeads(step.ctx, k_norm, norm_eps, keys, rows * kv_heads, head_dim);

  kernels::RopeParams turn{.x = queries,
                           .stride = q_dim,
                           .head_stride = head_dim,
                           .rows = rows,
                           .heads = heads,
                           .dim = rope->dim(),
                           .positions = step.positions.data(),
                           .cos = rope->cos(),
                           .sin = rope->sin(),
                           .interleaved = rope->interleaved()};
  kernels::Rope(step.ctx, turn);
  turn.x = keys;
  turn.stride = kv_dim;
  turn.heads = kv_heads;
  kernels::Rope(step.ctx, turn);

  kernels::KvWrite(step.ctx, {.cache = kv,
                              .keys = keys,
                              .values = values,
                              .key_stride = kv_dim,
                              .value_stride = kv_dim,
                              .sequences = step.sequences});
  kernels::BuildKeySummaries(step.ctx, {.cache = kv, .sequences = step.sequences});
  AttendChosen(step, {.cache = kv,
                      .q = queries,
                      .q_stride = q_dim,
                      .out = mixed,
                      .out_stride = q_dim,
                      .heads = heads,
                      .scale = scale,
                      .sequences = step.sequences});
}

void GqaAttention::Forward(const Step& step, const float* x, const kernels::KvLayer& kv, float* out,
                           bool accumulate, const kernels::ColumnParts& parts) const {
  ScratchScope scratch(step.ctx);
  auto* mixed = scratch.Take<float>(static_cast<int64_t>(step.rows()) * mixed_dim());
  Mix(step, x, kv, mixed);
  Apply(step.ctx, o, mixed, mixed_dim(), step.rows(), out, o.n(), accumulate, parts);
}

}  // namespace moesaic::layers
