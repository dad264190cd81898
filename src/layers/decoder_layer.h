// One pre-norm decoder layer: attention and feed-forward network around a residual stream in f32.
#pragma once

#include <variant>

#include "layers/attention_gqa.h"
#include "layers/attention_mla.h"
#include "layers/mlp.h"
#include "layers/moe.h"

namespace moesaic::layers {

struct DecoderLayer {
  const float* attention_norm = nullptr;  // [hidden], before attention
  const float* ffn_norm = nullptr;        // [hidden], before the feed-forward network
  // Sandwich norm (openPangu): norms of the outputs before they are added to the residual stream; null: none.
  const float* attention_out_norm = nullptr;
  const float* ffn_out_norm = nullptr;
  float norm_eps = 0;
  int hidden = 0;
  std::variant<GqaAttention, MlaAttention> attention;
  std::variant<Mlp, MoeLayer> ffn;

  /// Updates the residual stream x [rows, hidden] in place.
  void Forward(const Step& step, const kernels::KvLayer& kv, float* x) const;
  /// The two halves of Forward().
  void AddAttention(const Step& step, const kernels::KvLayer& kv, float* x) const;
  void AddFfn(const Step& step, float* x) const;
  /// x += out, where out [rows, hidden] is the feed-forward network's output. If the layer has an output
  /// norm, `out` is normed in place first.
  void JoinFfn(const Step& step, float* out, float* x) const;
  /// y = norm(x) with one of the weights above; x and y are [rows, hidden].
  void Norm(const Step& step, const float* weight, const float* x, float* y) const;

 private:
  void Join(const Step& step, const float* weight, float* out, float* x) const;
};

}  // namespace moesaic::layers
