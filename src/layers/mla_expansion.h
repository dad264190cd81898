// Per-head keys and values of one sequence's cached latents, in scratch memory, for attention_mla.
#pragma once

#include "kernels/ops.h"
#include "layers/step.h"

namespace moesaic::layers {

struct MlaAttention;

/// Rows [rows][heads][stride] of activations, the first k of each head prepared for a matrix of its own.
/// All are prepared in one pass; head(h) is the strided view of one head's.
class HeadRows {
 public:
  HeadRows(const kernels::ExecContext& ctx, const tensor::PackedMatrix& weight, const float* x, int stride,
           int rows, int heads, int k);
  const kernels::PreparedRows* head(int h) const { return views_ + h; }

 private:
  kernels::PreparedRows* views_;
};

/// Lives in the scratch memory of the scope it is made in.
class MlaExpansion {
 public:
  /// Reads the latents of all start + count tokens of `sequence` back from `kv`.
  MlaExpansion(const kernels::ExecContext& ctx, const MlaAttention& attention,
               const kernels::SequenceSlice& sequence, const kernels::KvLayer& kv);

  /// Heads whose keys and values exist at the same time: as many as fit expansion_bytes, at least one.
  int heads_at_once() const { return heads_at_once_; }
  int value_dim() const { return value_dim_; }                 ///< v_dim rounded up to the kernel's 8
  const int32_t* block_table() const { return block_table_; }  ///< of what Heads returns

  /// Expands heads [first, first + count), count <= heads_at_once(), and returns them as a KV layer that is
  /// valid until the next call.
  kernels::KvLayer Heads(int first, int count) const;

 private:
  const kernels::ExecContext& ctx_;
  const MlaAttention& attention_;
  int tokens_, blocks_, value_dim_, heads_at_once_;
  kernels::PreparedRows* latents_;  // [blocks_], 64 rows each
  float* rotated_;                  // [tokens_, rope_dim]
  int32_t* block_table_;            // 0, 1, 2, ...
  float* expanded_;                 // [blocks_][heads_at_once_][64][key_dim], then values likewise
};

}  // namespace moesaic::layers
