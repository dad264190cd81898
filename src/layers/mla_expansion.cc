#include "layers/mla_expansion.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "base/check.h"
#include "base/round.h"
#include "layers/attention_mla.h"
#include "tensor/dtype.h"

namespace moesaic::layers {
namespace {

using kernels::kKvBlockTokens;
using kernels::KvLayer;
using kernels::LinearParams;
using kernels::QuantizedActivations;

// Returns a view of `count` rows from `first` on with stride `step`.
QuantizedActivations Slice(const QuantizedActivations& all, int first, int step, int count) {
  // Scales of other formats would have to be moved, too.
  MOESAIC_CHECK(all.format == tensor::PackedFormat::kF32 || all.format == tensor::PackedFormat::kBF16);
  QuantizedActivations view = all;
  view.rows = count;
  view.stride = all.stride * step;
  view.data = all.data.subspan(all.stride * first);
  return view;
}

// For kI8, multiplies the integers by `scale`.
void ToFloat(const std::byte* from, tensor::DType dtype, float scale, int count, float* to) {
  if (dtype == tensor::DType::kI8) {
    const auto* values = reinterpret_cast<const int8_t*>(from);
    for (int i = 0; i < count; ++i) to[i] = static_cast<float>(values[i]) * scale;
    return;
  }
  if (dtype == tensor::DType::kF32) {
    std::memcpy(to, from, count * sizeof(float));
    return;
  }
  const auto* values = reinterpret_cast<const tensor::BF16*>(from);
  for (int i = 0; i < count; ++i) to[i] = tensor::ToFloat(values[i]);
}

}  // namespace

HeadRows::HeadRows(const kernels::ExecContext& ctx, const tensor::PackedMatrix& weight, const float* x,
                   int stride, int rows, int heads, int k)
    : views_(ctx.scratch->Take<QuantizedActivations>(heads).data()) {
  const QuantizedActivations all =
      kernels::QuantizeActivations(ctx, weight.layout.format, x, stride, rows * heads, k);
  for (int h = 0; h < heads; ++h) views_[h] = Slice(all, h, heads, rows);
}

MlaExpansion::MlaExpansion(const kernels::ExecContext& ctx, const MlaAttention& attention,
                           const kernels::SequenceSlice& sequence, const KvLayer& kv)
    : ctx_(ctx), attention_(attention), tokens_(sequence.start + sequence.count) {
  const int latent_dim = attention.latent_dim;
  const int rope_dim = attention.rope_dim;
  blocks_ = base::CeilDiv(tokens_, kKvBlockTokens);
  value_dim_ = base::RoundUp(attention.v_dim, 8);
  const int key_dim = attention.nope_dim + rope_dim;
  const int64_t head_bytes = int64_t{blocks_} * kKvBlockTokens * (key_dim + value_dim_) * sizeof(float);
  heads_at_once_ =
      static_cast<int>(std::clamp<int64_t>(attention.expansion_bytes / head_bytes, 1, attention.heads));
  expanded_ = ctx.scratch->Take<float>(head_bytes / sizeof(float) * heads_at_once_).data();
  block_table_ = ctx.scratch->Take<int32_t>(blocks_).data();
  std::iota(block_table_, block_table_ + blocks_, 0);
  rotated_ = ctx.scratch->Take<float>(static_cast<size_t>(tokens_) * rope_dim).data();
  latents_ = ctx.scratch->Take<QuantizedActivations>(blocks_).data();

  auto* plain = ctx.scratch->Take<float>(static_cast<size_t>(tokens_) * latent_dim).data();
  const int64_t row_bytes = tensor::BytesOf(kv.dtype, attention.cache_row());
  ctx.pool->Run(blocks_, [&](int64_t block, int) {
    const std::byte* base = kv.base + sequence.block_table[block] * kv.block_stride;
    const auto* scales = reinterpret_cast<const float*>(base + kv.scale_offset());
    const bool scaled = kv.dtype == tensor::DType::kI8;
    const int first = static_cast<int>(block) * kKvBlockTokens;
    for (int t = first; t < std::min(first + kKvBlockTokens, tokens_); ++t) {
      const std::byte* row = base + (t - first) * row_bytes;
      const int slot = t - first;
      ToFloat(row, kv.dtype, scaled ? scales[slot] : 1, latent_dim,
              plain + static_cast<int64_t>(t) * latent_dim);
      ToFloat(row + tensor::BytesOf(kv.dtype, attention.padded_latent()), kv.dtype,
              scaled ? scales[kKvBlockTokens + slot] : 1, rope_dim,
              rotated_ + static_cast<int64_t>(t) * rope_dim);
    }
  });
  const QuantizedActivations all = kernels::QuantizeActivations(ctx, attention.uk.front().layout.format,
                                                                plain, latent_dim, tokens_, latent_dim);
  for (int b = 0; b < blocks_; ++b) {
    const int first = b * kKvBlockTokens;
    latents_[b] = Slice(all, first, 1, std::min(kKvBlockTokens, tokens_ - first));
  }
}

KvLayer MlaExpansion::Heads(int first, int count) const {
  const MlaAttention& a = attention_;
  const int key_dim = a.nope_dim + a.rope_dim;
  const int64_t keys = int64_t{kKvBlockTokens} * key_dim;  // floats of one head in one block
  const int64_t values = int64_t{kKvBlockTokens} * value_dim_;
  const int64_t block_floats = count * (keys + values);

  const ScratchScope scope(ctx_);
  const std::span<LinearParams> group =
      ctx_.scratch->Take<LinearParams>(static_cast<size_t>(blocks_) * count * 2);
  size_t used = 0;
  for (int b = 0; b < blocks_; ++b) {
    for (int h = 0; h < count; ++h) {
      float* key = expanded_ + b * block_floats + h * (keys + values);
      group[used++] = {.a = &latents_[b], .w = &a.uk[first + h], .c = key, .c_stride = key_dim};
      group[used++] = {.a = &latents_[b], .w = &a.uv[first + h], .c = key + keys, .c_stride = value_dim_};
    }
  }
  kernels::LinearGroup(ctx_, group);
  ctx_.pool->Run(int64_t{blocks_} * count, [&](int64_t task, int) {
    const int64_t b = task / count;
    const int64_t h = task % count;
    float* key = expanded_ + b * block_floats + h * (keys + values);
    float* value = key + keys;
    const int from = static_cast<int>(b) * kKvBlockTokens;
    for (int t = 0; t < std::min(kKvBlockTokens, tokens_ - from); ++t) {
      std::copy_n(rotated_ + static_cast<int64_t>(from + t) * a.rope_dim, a.rope_dim,
                  key + t * key_dim + a.nope_dim);
      std::fill_n(value + t * value_dim_ + a.v_dim, value_dim_ - a.v_dim, 0.0F);
    }
  });
  KvLayer layer = {{.heads = count, .key_dim = key_dim, .value_dim = value_dim_}};
  layer.base = reinterpret_cast<std::byte*>(expanded_);
  layer.block_stride = block_floats * static_cast<int64_t>(sizeof(float));
  return layer;
}

}  // namespace moesaic::layers
