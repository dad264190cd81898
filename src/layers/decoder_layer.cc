#include "layers/decoder_layer.h"

namespace moesaic::layers {
namespace {

// Joins `out` to the residual stream, normed first when there is a weight for it.
void Join(const Step& step, const DecoderLayer& layer, const float* weight, float* out, float* x) {
  if (weight != nullptr) {
    kernels::RmsNorm(step.ctx, {.x = out,
                                .x_stride = layer.hidden,
                                .weight = weight,
                                .y = out,
                                .y_stride = layer.hidden,
                                .rows = step.rows(),
                                .n = layer.hidden,
                                .eps = layer.norm_eps});
  }
  kernels::Add(step.ctx, out, static_cast<int64_t>(step.rows()) * layer.hidden, x);
}

}  // namespace

void DecoderLayer::Forward(const Step& step, const kernels::KvLayer& kv, float* x) const {
  ScratchScope scratch(step.ctx);
  const int64_t count = static_cast<int64_t>(step.rows()) * hidden;
  auto* normed = scratch.Take<float>(count);
  auto* out = scratch.Take<float>(count);
  kernels::RmsNormParams norm{.x = x,
                              .x_stride = hidden,
                              .weight = attention_norm,
                              .y = normed,
                              .y_stride = hidden,
                              .rows = step.rows(),
                              .n = hidden,
                              .eps = norm_eps};
  kernels::RmsNorm(step.ctx, norm);
  // Where nothing comes between, projections add into the residual stream themselves.
  const bool direct = attention_out_norm == nullptr;
  std::visit([&](const auto& kind) { kind.Forward(step, normed, kv, direct ? x : out, direct); }, attention);
  if (!direct) Join(step, *this, attention_out_norm, out, x);

  norm.weight = ffn_norm;
  kernels::RmsNorm(step.ctx, norm);
  if (const auto* mlp = std::get_if<Mlp>(&ffn); mlp != nullptr && ffn_out_norm == nullptr) {
    mlp->Forward(step, normed, x, /*accumulate=*/true);
    return;
  }
  if (const auto* mlp = std::get_if<Mlp>(&ffn)) {
    mlp->Forward(step, normed, out, /*accumulate=*/false);
  } else {
    std::get<MoeLayer>(ffn).Forward(step, normed, out);
  }
  Join(step, *this, ffn_out_norm, out, x);
}

}  // namespace moesaic::layers
