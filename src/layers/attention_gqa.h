// Grouped-query attention (arXiv 2305.13245) with rotary embedding over a paged KV cache.
#pragma once

#include "layers/linear.h"
#include "layers/rope_table.h"

namespace moesaic::layers {

struct GqaAttention {
  Linear q, k, v, o;
  const float* q_norm = nullptr;  // [head_dim] or null: RMSNorm of each head before rope
  const float* k_norm = nullptr;
  float norm_eps = 0;
  int heads = 0, kv_heads = 0, head_dim = 0;
  float scale = 0;
  const RopeTable* rope = nullptr;  // rotates the first rope->dim() elements of a head

  /// Writes keys and values of the step's tokens into `kv` and sets out [rows, hidden] = attention(x [rows,
  /// hidden]). With `accumulate`, adds to `out` instead. `parts` divides the columns of `out`: its callback
  /// gets each range when it is complete, for example to start a sum over ranks.
  void Forward(const Step& step, const float* x, const kernels::KvLayer& kv, float* out, bool accumulate,
               const kernels::ColumnParts& parts = {}) const;
  /// Computes Forward() without the output projection: `mixed` [rows, mixed_dim()] is the input of o.
  void Mix(const Step& step, const float* x, const kernels::KvLayer& kv, float* mixed) const;
  int mixed_dim() const { return heads * head_dim; }
};

}  // namespace moesaic::layers
