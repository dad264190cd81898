#include "layers/decoder_layer.h"

#include "kernels/elementwise.h"
#include "layers/shard_sum.h"

namespace moesaic::layers {

void DecoderLayer::Norm(const Step& step, const float* weight, const float* x, float* y) const {
  kernels::RmsNorm(step.ctx, {.x = x,
                              .x_stride = hidden,
                              .weight = weight,
                              .y = y,
                              .y_stride = hidden,
                              .rows = step.rows(),
                              .n = hidden,
                              .eps = norm_eps});
}

// Adds `out` to the residual stream, after norming it if `weight` is given.
void DecoderLayer::Join(const Step& step, const float* weight, float* out, float* x) const {
  if (weight != nullptr) Norm(step, weight, out, out);
  kernels::Add(step.ctx, out, static_cast<int64_t>(step.rows()) * hidden, x);
}

void DecoderLayer::JoinFfn(const Step& step, float* out, float* x) const { Join(step, ffn_out_norm, out, x); }

void DecoderLayer::AddAttention(const Step& step, const kernels::KvLayer& kv, float* x) const {
  ScratchScope scratch(step.ctx);
  const int64_t count = static_cast<int64_t>(step.rows()) * hidden;
  auto* normed = scratch.Take<float>(count);
  Norm(step, attention_norm, x, normed);
  // Without output norms and partial sums, projections accumulate directly into the residual stream.
  const bool direct = attention_out_norm == nullptr && !step.has_shards();
  float* out = direct ? x : scratch.Take<float>(count);
  ShardSum sum(step, scratch, out, hidden);
  std::visit([&](const auto& kind) { kind.Forward(step, normed, kv, out, direct, sum.parts()); }, attention);
  if (direct) return;
  sum.Wait();
  Join(step, attention_out_norm, out, x);
}

void DecoderLayer::AddFfn(const Step& step, float* x) const {
  ScratchScope scratch(step.ctx);
  const int64_t count = static_cast<int64_t>(step.rows()) * hidden;
  auto* normed = scratch.Take<float>(count);
  Norm(step, ffn_norm, x, normed);
  const auto* mlp = std::get_if<Mlp>(&ffn);
  if (mlp != nullptr && ffn_out_norm == nullptr && !step.has_shards()) {
    mlp->Forward(step, normed, x, /*accumulate=*/true);
    return;
  }
  auto* out = scratch.Take<float>(count);
  ShardSum sum(step, scratch, out, hidden);
  if (mlp != nullptr) {
    mlp->Forward(step, normed, out, /*accumulate=*/false, sum.parts());
  } else {
    std::get<MoeLayer>(ffn).Forward(step, normed, out, sum.parts());
  }
  sum.Wait();
  JoinFfn(step, out, x);
}

void DecoderLayer::Forward(const Step& step, const kernels::KvLayer& kv, float* x) const {
  AddAttention(step, kv, x);
  step.Progress();
  AddFfn(step, x);
  step.Progress();
}

}  // namespace moesaic::layers
