// Tensors whose rows a GGUF file has elsewhere than the Hub: read row by row, never as a whole.
#pragma once

#include <memory>

#include "base/status.h"
#include "checkpoint/checkpoint.h"

namespace moesaic::checkpoint {

/// Undoes what llama.cpp's converter does to Llama's q and k: it interleaves the two halves of each head's
/// rows for its rotary embedding; Hub checkpoints have them one after the other. `entry` is a weight
/// [heads * head_dim, in] or a bias [heads * head_dim].
StatusOr<TensorEntry> UndoRotaryOrder(TensorEntry entry, int64_t heads);

/// The sizes of an MLA's key and value expansion.
struct KvExpansion {
  int64_t heads, nope, v, latent;
};

/// kv_b_proj [heads * (nope + v), latent], which newer files store in two: `k` [heads, latent, nope],
/// transposed, and `v` [heads, v, latent].
StatusOr<TensorEntry> JoinKvExpansion(const TensorEntry& k, const TensorEntry& v, const KvExpansion& sizes,
                                      const std::string& name);

}  // namespace moesaic::checkpoint
