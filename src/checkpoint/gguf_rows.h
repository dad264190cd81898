// Row readers for tensors whose rows a GGUF file stores in a different order from the Hub. They read row by
// row, never the whole tensor.
#pragma once

#include <memory>

#include "base/status.h"
#include "checkpoint/checkpoint.h"

namespace moesaic::checkpoint {

/// Undoes the permutation by which llama.cpp's converter interleaves the two halves of each head of Llama's q
/// and k for its rotary embedding; Hub checkpoints store the halves consecutively. `entry` is a weight [heads
/// * head_dim, in] or a bias [heads * head_dim].
StatusOr<TensorEntry> UndoRotaryOrder(TensorEntry entry, int64_t heads);

/// Sizes of an MLA layer's key and value expansion.
struct KvExpansion {
  int64_t heads, nope, v, latent;
};

/// Joins kv_b_proj [heads * (nope + v), latent], which newer files store as two tensors: `k` [heads, latent,
/// nope], transposed, and `v` [heads, v, latent].
StatusOr<TensorEntry> JoinKvExpansion(const TensorEntry& k, const TensorEntry& v, const KvExpansion& sizes,
                                      const std::string& name);

}  // namespace moesaic::checkpoint
