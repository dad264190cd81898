// Memory of a walk through a layer.
#include <algorithm>

#include "quantizer/calibrate/layer_walk.h"
#include "quantizer/gptq/input_products.h"

namespace moesaic::quantizer {

WalkScratch WalkScratchOf(const models::DecoderSpec& spec, int64_t tokens, int64_t longest, int part_rows) {
  constexpr int64_t kFloat = sizeof(float);
  const models::AttentionSpec& a = spec.attention;
  const int64_t hidden = spec.hidden;
  WalkScratch scratch;
  {
    const int64_t rows = std::min(tokens, std::max<int64_t>(longest, CalibrationStream::kBatchTokens));
    const bool mla = a.kind == models::AttentionSpec::Kind::kMla;
    const int64_t mixed = a.heads * int64_t{mla ? a.v_dim : a.head_dim};
    // Normed inputs and their kernel form, queries, keys and values or latents, and the output of attention,
    // twice for its kernel form or partial sums.
    int64_t of_row = 2 * hidden + 2 * mixed + (spec.sandwich_norm ? hidden : 0);
    int64_t floats = int64_t{1} << 20;
    if (mla) {
      of_row += a.heads * int64_t{a.nope_dim + a.rope_dim} + a.kv_lora_rank + a.rope_dim + a.q_lora_rank;
      // Keys and values of some heads, with their sources.
      floats += std::max<int64_t>(int64_t{12} << 20, 2 * longest * (a.nope_dim + a.rope_dim + a.v_dim)) +
                longest * (2 * a.kv_lora_rank + a.rope_dim);
    } else {
      of_row += mixed + int64_t{2} * a.kv_heads * a.head_dim;
    }
    floats += rows * of_row;
    const int64_t add = rows * mixed * kFloat + AddProductsBytes(std::max(mixed, hidden), rows);
    scratch.attention = std::max(floats * kFloat, add);
  }
  const int64_t rows = std::min<int64_t>(tokens, part_rows);
  const auto mlp = [&](int64_t width, int64_t beside) {
    // Gated values while they are computed, multiplied, or added to a Hessian.
    const int64_t forward = rows * (beside + 2 * (hidden + width)) * kFloat;
    const int64_t add =
        rows * (beside + std::max(hidden, width)) * kFloat + AddProductsBytes(std::max(hidden, width), rows);
    scratch.ffn = std::max({scratch.ffn, forward, add});
  };
  mlp(spec.intermediate, spec.sandwich_norm ? hidden : 0);
  if (spec.moe.experts > 0) {
    mlp(spec.moe.intermediate, hidden);
    mlp(spec.moe.shared_intermediate, 0);
  }
  return scratch;
}

int64_t RoutingBytes(const models::DecoderSpec& spec, int64_t tokens) {
  return tokens * (spec.hidden + int64_t{4} * spec.moe.top_k + 1) * static_cast<int64_t>(sizeof(float));
}

int64_t WalkBytes(const models::DecoderSpec& spec, int64_t tokens, int64_t longest) {
  const WalkScratch scratch = WalkScratchOf(spec, tokens, longest, CalibrationStream::kBatchTokens);
  return std::max(scratch.attention, scratch.ffn) + (spec.moe.experts > 0 ? RoutingBytes(spec, tokens) : 0);
}

}  // namespace moesaic::quantizer
