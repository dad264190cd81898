// Expands the cached latents of one sequence to per-head keys and values in scratch memory, for
// attention_mla.
#pragma once

#include "kernels/attention.h"
#include "kernels/linear.h"
#include "layers/step.h"

namespace moesaic::layers {

struct MlaAttention;

/// Quantizes rows [rows][heads][stride] of activations in one pass: the first k elements of each head for
/// that head's matrix. head(h) is the strided view of one head.
class HeadRows {
 public:
  HeadRows(const kernels::ExecContext& ctx, const tensor::PackedMatrix& weight, const float* x, int stride,
           int rows, int heads, int k);
  const kernels::QuantizedActivations* head(int h) const { return views_ + h; }

 private:
  kernels::QuantizedActivations* views_;
};

/// Allocated in the scratch scope in which it is constructed.
class MlaExpansion {
 public:
  /// Reads the latents of all start + count tokens of `sequence` from `kv`.
  MlaExpansion(const kernels::ExecContext& ctx, const MlaAttention& attention,
               const kernels::SequenceSlice& sequence, const kernels::KvLayer& kv);

  /// Returns the number of heads expanded together: as many as fit expansion_bytes, at least one.
  int heads_at_once() const { return heads_at_once_; }
  int value_dim() const { return value_dim_; }  ///< v_dim rounded up to the kernel's 8
  /// Returns the block table of the KV layer that Heads returns.
  const int32_t* block_table() const { return block_table_; }

  /// Expands heads [first, first + count), count <= heads_at_once(). Returns them as a KV layer, valid until
  /// the next call.
  kernels::KvLayer Heads(int first, int count) const;

 private:
  const kernels::ExecContext& ctx_;
  const MlaAttention& attention_;
  int tokens_, blocks_, value_dim_, heads_at_once_;
  kernels::QuantizedActivations* latents_;  // [blocks_], 64 rows each
  float* rotated_;                          // [tokens_, rope_dim]
  int32_t* block_table_;                    // 0, 1, 2, ...
  float* expanded_;                         // [blocks_][heads_at_once_][64][key_dim], then values likewise
};

}  // namespace moesaic::layers
