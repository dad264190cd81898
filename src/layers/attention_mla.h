// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). The cache holds one latent and one rotated key
// per token, shared by all heads.
//
// Two algorithms compute the same result up to rounding:
// - Expanded: W_UK and W_UV expand every cached latent into per-head keys and values, and ordinary attention
//   runs over them. It is cheaper when many new tokens share the expansion.
// - Absorbed: W_UK^T projects queries into the latent space, attention runs over the latents directly, and
//   W_UV projects the result. It is cheaper for few new tokens.
#pragma once

#include <vector>

#include "layers/linear.h"
#include "layers/rope_table.h"

namespace moesaic::layers {

enum class MlaPath { kAuto, kAbsorbed, kExpanded };

struct MlaAttention {
  // Query projection: q_a, q_a_norm and q_b, or q alone if q_a is empty.
  Linear q, q_a, q_b;
  const float* q_a_norm = nullptr;   // [q_lora_rank]
  Linear kv_a;                       // [latent_dim + rope_dim, hidden]
  const float* kv_a_norm = nullptr;  // [latent_dim]
  // Per head: uk [nope_dim, latent_dim] and uv [v_dim, latent_dim] project latents to keys and values; uk_t
  // is uk transposed.
  std::vector<tensor::PackedMatrix> uk, uv, uk_t;
  Linear o;  // [hidden, heads * v_dim]
  float norm_eps = 0;
  int heads = 0, latent_dim = 0, nope_dim = 0, rope_dim = 0, v_dim = 0;
  float scale = 0;
  const RopeTable* rope = nullptr;
  MlaPath path = MlaPath::kAuto;
  // Memory limit in bytes for expanded keys and values; it bounds the number of heads expanded together. They
  // are written once and read once per 64 query rows, so the default is about the size of a last-level cache.
  int64_t expansion_bytes = int64_t{32} << 20;

  /// Writes latents and rotated keys of the step's tokens into `kv` and sets out [rows, hidden] = attention(x
  /// [rows, hidden]). With `accumulate`, adds to `out` instead. `parts` are those of `out`.
  void Forward(const Step& step, const float* x, const kernels::KvLayer& kv, float* out, bool accumulate,
               const kernels::ColumnParts& parts = {}) const;

  /// Computes Forward() without the output projection: `mixed` [rows, mixed_dim()] is the input of o.
  void Mix(const Step& step, const float* x, const kernels::KvLayer& kv, float* mixed) const;
  int mixed_dim() const { return heads * v_dim; }
  /// Computes the input of q_b, [rows, q_a.n()]. Requires q_a.
  void LowQueries(const Step& step, const float* x, float* low) const;

  /// Layout of a cached row: the latent, zeros up to a multiple of the attention kernel's 8 elements, the
  /// rotated key.
  int padded_latent() const { return (latent_dim + 7) / 8 * 8; }
  int cache_row() const { return padded_latent() + rope_dim; }

  /// Returns whether expansion is cheaper for a sequence's new tokens. It is always false for sequences with
  /// block sparsity. The choice depends on this sequence's chunk alone, not on other rows of the batch.
  bool Expands(const kernels::SequenceSlice& sequence) const;

 private:
  int q_head() const { return nope_dim + rope_dim; }
  void Project(const Step& step, const float* x, float* queries, float* latents) const;
  void NormLowQueries(const Step& step, float* low) const;
  void Absorbed(const Step& step, std::span<const kernels::SequenceSlice> run, const kernels::KvLayer& kv,
                const float* queries, float* out) const;
  void Expanded(const Step& step, const kernels::SequenceSlice& sequence, const kernels::KvLayer& kv,
                const float* queries, float* out) const;
};

}  // namespace moesaic::layers
