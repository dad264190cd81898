// Attention over a paged KV cache: the layout of a layer's cache, writing to it, and dense attention.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/exec_context.h"
#include "tensor/dtype.h"
#include "tensor/kv_layout.h"

namespace moesaic::kernels {

struct RowSparsity;

/// One sequence's slice of a ragged batch: `count` new tokens at positions start..start+count-1, in rows
/// row..row+count-1 of the batch. Keys and values are stored in the blocks of `block_table`.
struct SequenceSlice {
  const int32_t* block_table;  // [ceil((start + count) / 64)] block numbers
  int start = 0;
  int count = 0;
  int row = 0;
  const RowSparsity* sparsity = nullptr;  // SparseAttention only; null: every row reads all blocks
  int kv_head = -1;                       // Attention only: compute this KV head alone; -1: all
};

using tensor::kKvBlockTokens;

/// One layer of a KV cache in memory: the layout of a block, and the address of this layer in each block.
///
/// Key summaries are stored apart from the blocks, those of a layer's blocks together, so that scoring them
/// reads few pages. Their layout is [heads][KeySummaryBytes] for a block's 64 keys. If shared, they have two
/// parts: the values and the rest of the keys.
struct KvLayer : tensor::KvLayout {
  std::byte* base = nullptr;           // start of this layer's data in block 0
  int64_t block_stride = 0;            // bytes from one block to the next
  std::byte* key_summaries = nullptr;  // summaries of block 0; null: none
  int64_t key_summary_stride = 0;      // bytes from one block's summaries to the next block's
  int index = 0;                       // index of the layer in its blocks
};

/// Returns the first dimension of a key's second part, which has its own summary and scales; key_dim if there
/// is only one part.
inline int KeySplit(const tensor::KvLayout& cache) { return cache.shared ? cache.value_dim : cache.key_dim; }

/// Stores new keys [rows, heads, key_dim] and values [rows, heads, value_dim] (ignored if shared) into
/// blocks. kI8: scale = amax / 127 of a row, q = round_half_even(x / scale). A row that is not finite gets
/// NaN as its scale.
struct KvWriteParams {
  KvLayer cache;
  const float* keys;    // [rows][key_stride]
  const float* values;  // [rows][value_stride]
  int64_t key_stride, value_stride;
  std::span<const SequenceSlice> sequences;
};
void KvWrite(const ExecContext& ctx, const KvWriteParams& params);

/// Causal attention of every new token over its sequence's cached keys, including itself (call KvWrite
/// first). Query heads are distributed evenly over KV heads. One pass over each KV block serves all query
/// heads of a group.
struct AttentionParams {
  KvLayer cache;
  const float* q;  // [rows][q_stride], heads consecutive, key_dim each
  int64_t q_stride;
  float* out;  // [rows][out_stride], heads consecutive, value_dim each
  int64_t out_stride;
  int heads;    // query heads, a multiple of cache.heads
  float scale;  // multiplies q . k
  std::span<const SequenceSlice> sequences;
  float* lse = nullptr;  // [rows][heads]: the logarithm of the sum of exp(scale q . k), or null
};
void Attention(const ExecContext& ctx, const AttentionParams& params);

}  // namespace moesaic::kernels
