// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): the cache holds one latent and one rotated key
// a token, shared by all heads.
//
// Two ways lead to the same result. Expanded: every cached latent is taken through W_UK and W_UV into
// per-head keys and values, over which ordinary attention runs; cheap when many new tokens share the
// expansion. Absorbed: queries are taken through W_UK^T into the latent space, attention runs over the
// latents as they are, and its output goes through W_UV; cheap for few new tokens. They differ by rounding
// only.
#pragma once

#include <vector>

#include "layers/linear.h"
#include "layers/rope_table.h"

namespace moesaic::layers {

enum class MlaPath { kAuto, kAbsorbed, kExpanded };

struct MlaAttention {
  // Queries: q_a, q_a_norm and q_b, or q alone when q_a is empty.
  Linear q, q_a, q_b;
  const float* q_a_norm = nullptr;   // [q_lora_rank]
  Linear kv_a;                       // [latent_dim + rope_dim, hidden]
  const float* kv_a_norm = nullptr;  // [latent_dim]
  // Of each head: keys [nope_dim, latent_dim] and values [v_dim, latent_dim] from latents, and the former
  // transposed.
  std::vector<tensor::PackedMatrix> uk, uv, uk_t;
  Linear o;  // [hidden, heads * v_dim]
  float norm_eps = 0;
  int heads = 0, latent_dim = 0, nope_dim = 0, rope_dim = 0, v_dim = 0;
  float scale = 0;
  const RopeTable* rope = nullptr;
  MlaPath path = MlaPath::kAuto;
  // Memory for expanded keys and values, so many heads of a sequence at a time as fit. They are written once
  // and read once for each 64 query rows: about a last-level cache.
  int64_t expansion_bytes = int64_t{32} << 20;

  /// Writes latents and rotated keys of the step's tokens into `kv`, and out [rows, hidden] = attention(x
  /// [rows, hidden]), or += with `accumulate`.
  void Forward(const Step& step, const float* x, const kernels::KvLayer& kv, float* out,
               bool accumulate) const;

  /// Forward without o: `mixed` [rows, mixed_dim()] is what o reads.
  void Mix(const Step& step, const float* x, const kernels::KvLayer& kv, float* mixed) const;
  int mixed_dim() const { return heads * v_dim; }
  /// What q_b reads, [rows, q_a.n()]: where there is a q_a.
  void LowQueries(const Step& step, const float* x, float* low) const;

  /// A cached row: the latent, zeros up to a multiple of the attention kernel's 8 elements, and the rotated
  /// key.
  int padded_latent() const { return (latent_dim + 7) / 8 * 8; }
  int cache_row() const { return padded_latent() + rope_dim; }

  /// Whether a sequence's new tokens are cheaper expanded; never where they choose blocks. Depends on this
  /// sequence alone, so that its results do not depend on the batch.
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
