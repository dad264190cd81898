#include "layers/attention_mla.h"

#include <algorithm>

#include "kernels/block_sparsity.h"
#include "kernels/elementwise.h"
#include "layers/attend_chosen.h"
#include "layers/mla_expansion.h"

namespace moesaic::layers {

using kernels::KvLayer;
using kernels::LinearParams;
using kernels::SequenceSlice;

bool MlaAttention::Expands(const SequenceSlice& sequence) const {
  if (sequence.sparsity != nullptr) return false;  // block selection applies to blocks of latents
  if (path != MlaPath::kAuto) return path == MlaPath::kExpanded;
  // Multiply-adds per head. Each new token attends to all cached tokens and to half of the new ones. A pair
  // costs 2 latent + rope (absorbed) or nope + rope + v (expanded). Projecting one token by W_UK and W_UV
  // costs latent * (nope + v): absorbed attention pays that per new token, expanded attention per token of
  // the sequence. With DeepSeek-V3's dimensions, a whole prompt is expanded from 2 tokens on, and a chunk
  // after a long prefix from about 171 tokens on.
  const int64_t added = sequence.count;
  const int64_t pairs = added * sequence.start + added * (added + 1) / 2;
  const int64_t through = static_cast<int64_t>(latent_dim) * (nope_dim + v_dim);
  const int64_t absorbed = pairs * (2 * latent_dim + rope_dim) + added * through;
  const int64_t expanded = pairs * (nope_dim + rope_dim + v_dim) + (sequence.start + added) * through;
  return expanded < absorbed;
}

void MlaAttention::NormLowQueries(const Step& step, float* low) const {
  kernels::RmsNorm(step.ctx, {.x = low,
                              .x_stride = q_a.n(),
                              .weight = q_a_norm,
                              .y = low,
                              .y_stride = q_a.n(),
                              .rows = step.rows(),
                              .n = q_a.n(),
                              .eps = norm_eps});
}

void MlaAttention::LowQueries(const Step& step, const float* x, float* low) const {
  Apply(step.ctx, q_a, x, q_a.k(), step.rows(), low, q_a.n());
  NormLowQueries(step, low);
}

void MlaAttention::Project(const Step& step, const float* x, float* queries, float* latents) const {
  const kernels::ExecContext& ctx = step.ctx;
  const int rows = step.rows();
  const int q_dim = heads * q_head();
  const int latent_row = cache_row();
  if (q_a.weight.empty()) {
    const LinearOutput outputs[] = {{&q, queries, q_dim}, {&kv_a, latents, latent_row}};
    ApplyGroup(ctx, outputs, x, q.k(), rows);
  } else {
    ScratchScope scratch(ctx);
    const int rank = q_a.n();
    auto* low = scratch.Take<float>(static_cast<int64_t>(rows) * rank);
    const LinearOutput outputs[] = {{&q_a, low, rank}, {&kv_a, latents, latent_row}};
    ApplyGroup(ctx, outputs, x, q_a.k(), rows);
    NormLowQueries(step, low);
    Apply(ctx, q_b, low, rank, rows, queries, q_dim);
  }
  if (padded_latent() != latent_dim) {
    for (int row = 0; row < rows; ++row) {
      float* latent = latents + static_cast<int64_t>(row) * latent_row;
      std::copy_backward(latent + latent_dim, latent + latent_dim + rope_dim, latent + latent_row);
      std::fill(latent + latent_dim, latent + padded_latent(), 0.0F);
    }
  }
  kernels::RmsNorm(ctx, {.x = latents,
                         .x_stride = latent_row,
                         .weight = kv_a_norm,
                         .y = latents,
                         .y_stride = latent_row,
                         .rows = rows,
                         .n = latent_dim,
                         .eps = norm_eps});
  kernels::RopeParams turn{.x = queries + nope_dim,
                           .stride = q_dim,
                           .head_stride = q_head(),
                           .rows = rows,
                           .heads = heads,
                           .dim = rope_dim,
                           .positions = step.positions.data(),
                           .cos = rope->cos(),
                           .sin = rope->sin(),
                           .interleaved = rope->interleaved()};
  kernels::Rope(ctx, turn);
  turn.x = latents + padded_latent();
  turn.stride = latent_row;
  turn.head_stride = rope_dim;
  turn.heads = 1;
  kernels::Rope(ctx, turn);
}

// `queries` and `out` belong to the whole step; `run` holds sequences with consecutive rows.
void MlaAttention::Absorbed(const Step& step, std::span<const SequenceSlice> run, const KvLayer& kv,
                            const float* queries, float* out) const {
  const kernels::ExecContext& ctx = step.ctx;
  ScratchScope scratch(ctx);
  const int first = run.front().row;
  const int rows = run.back().row + run.back().count - first;
  const int latent_row = cache_row();
  const int64_t q_dim = static_cast<int64_t>(heads) * q_head();
  const int64_t wide = static_cast<int64_t>(heads) * latent_row;
  queries += first * q_dim;
  out += static_cast<int64_t>(first) * heads * v_dim;
  auto* sequences = scratch.Take<SequenceSlice>(static_cast<int64_t>(run.size()));
  for (size_t i = 0; i < run.size(); ++i) {
    sequences[i] = run[i];
    sequences[i].row -= first;
  }

  auto* wide_queries = scratch.Take<float>(rows * wide);
  {
    ScratchScope inner(ctx);
    const HeadRows parts(ctx, uk_t.front(), queries, q_head(), rows, heads, nope_dim);
    auto* group = inner.Take<LinearParams>(heads);
    for (int h = 0; h < heads; ++h) {
      group[h] = {.a = parts.head(h), .w = &uk_t[h], .c = wide_queries + h * latent_row, .c_stride = wide};
    }
    kernels::LinearGroup(ctx, {group, static_cast<size_t>(heads)});
  }
  ctx.pool->Run(rows, [&](int64_t row, int) {
    for (int h = 0; h < heads; ++h) {
      const float* from = queries + row * q_dim + static_cast<int64_t>(h) * q_head() + nope_dim;
      float* to = wide_queries + row * wide + static_cast<int64_t>(h) * latent_row;
      std::fill(to + latent_dim, to + padded_latent(), 0.0F);
      std::copy_n(from, rope_dim, to + padded_latent());
    }
  });
  const int64_t mixed_row = static_cast<int64_t>(heads) * padded_latent();
  auto* mixed = scratch.Take<float>(rows * mixed_row);
  AttendChosen(step, {.cache = kv,
                      .q = wide_queries,
                      .q_stride = wide,
                      .out = mixed,
                      .out_stride = mixed_row,
                      .heads = heads,
                      .scale = scale,
                      .sequences = {sequences, run.size()}});
  const HeadRows parts(ctx, uv.front(), mixed, padded_latent(), rows, heads, latent_dim);
  auto* group = scratch.Take<LinearParams>(heads);
  for (int h = 0; h < heads; ++h) {
    group[h] = {.a = parts.head(h),
                .w = &uv[h],
                .c = out + static_cast<int64_t>(h) * v_dim,
                .c_stride = static_cast<int64_t>(heads) * v_dim};
  }
  kernels::LinearGroup(ctx, {group, static_cast<size_t>(heads)});
}

void MlaAttention::Expanded(const Step& step, const SequenceSlice& sequence, const KvLayer& kv,
                            const float* queries, float* out) const {
  const kernels::ExecContext& ctx = step.ctx;
  ScratchScope scratch(ctx);
  const int64_t q_dim = static_cast<int64_t>(heads) * q_head();
  const MlaExpansion expansion(ctx, *this, sequence, kv);
  const int padded_v = expansion.value_dim();
  const int64_t mixed_row = static_cast<int64_t>(heads) * padded_v;
  float* mixed = out + static_cast<int64_t>(sequence.row) * heads * v_dim;
  if (padded_v != v_dim) mixed = scratch.Take<float>(sequence.count * mixed_row);

  for (int head = 0; head < heads; head += expansion.heads_at_once()) {
    const int count = std::min(expansion.heads_at_once(), heads - head);
    SequenceSlice slice = sequence;
    slice.block_table = expansion.block_table();
    slice.row = 0;
    kernels::Attention(ctx, {.cache = expansion.Heads(head, count),
                             .q = queries + sequence.row * q_dim + static_cast<int64_t>(head) * q_head(),
                             .q_stride = q_dim,
                             .out = mixed + static_cast<int64_t>(head) * padded_v,
                             .out_stride = mixed_row,
                             .heads = count,
                             .scale = scale,
                             .sequences = {&slice, 1}});
  }
  if (padded_v == v_dim) return;
  float* dense = out + static_cast<int64_t>(sequence.row) * heads * v_dim;
  ctx.pool->Run(sequence.count, [&](int64_t row, int) {
    for (int h = 0; h < heads; ++h) {
      std::copy_n(mixed + row * mixed_row + static_cast<int64_t>(h) * padded_v, v_dim,
                  dense + (row * heads + h) * v_dim);
    }
  });
}

void MlaAttention::Mix(const Step& step, const float* x, const KvLayer& kv, float* mixed) const {
  ScratchScope scratch(step.ctx);
  const int64_t rows = step.rows();
  const int latent_row = cache_row();
  auto* queries = scratch.Take<float>(rows * heads * q_head());
  auto* latents = scratch.Take<float>(rows * latent_row);
  Project(step, x, queries, latents);
  kernels::KvWrite(step.ctx, {.cache = kv,
                              .keys = latents,
                              .values = latents,
                              .key_stride = latent_row,
                              .value_stride = latent_row,
                              .sequences = step.sequences});
  kernels::BuildKeySummaries(step.ctx, {.cache = kv, .sequences = step.sequences});
  const std::span<const SequenceSlice> slices = kernels::CutAtFirstChoice(step.ctx, kv, step.sequences);
  for (size_t i = 0; i < slices.size();) {
    if (Expands(slices[i])) {
      step.Fetch(kv, slices.subspan(i, 1));
      Expanded(step, slices[i++], kv, queries, mixed);
      continue;
    }
    size_t end = i + 1;
    while (end < slices.size() && !Expands(slices[end])) ++end;
    Absorbed(step, slices.subspan(i, end - i), kv, queries, mixed);
    i = end;
  }
}

void MlaAttention::Forward(const Step& step, const float* x, const KvLayer& kv, float* out, bool accumulate,
                           const kernels::ColumnParts& parts) const {
  ScratchScope scratch(step.ctx);
  auto* mixed = scratch.Take<float>(static_cast<int64_t>(step.rows()) * mixed_dim());
  Mix(step, x, kv, mixed);
  Apply(step.ctx, o, mixed, mixed_dim(), step.rows(), out, o.n(), accumulate, parts);
}

}  // namespace moesaic::layers
