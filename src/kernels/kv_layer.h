// Sizes of key summaries, and layers of a given shape.
#pragma once

#include "kernels/attention.h"
#include "kernels/sketch.h"

namespace moesaic::kernels {

/// Returns the bytes of one KV head's key summary of a block.
inline int64_t KeySummaryBytes(const KvLayer& cache) {
  return KeySummaryBytes(cache.key_dim, KeySplit(cache), cache.sketches);
}

/// Returns the bytes of a block's key summaries in one layer, of all heads.
inline int64_t LayerSummaryBytes(const tensor::KvLayout& layout) {
  return layout.heads * KeySummaryBytes(layout.key_dim, KeySplit(layout), layout.sketches);
}

/// Returns a layer of `heads` KV heads whose blocks have no other layer, with room for key summaries. Its
/// memory, `base` and `key_summaries`, is not set.
inline KvLayer LayOutKv(tensor::DType dtype, int heads, int key_dim, int value_dim, bool shared,
                        bool sketches = false) {
  KvLayer layer = {{.heads = heads,
                    .key_dim = key_dim,
                    .value_dim = value_dim,
                    .shared = shared,
                    .dtype = dtype,
                    .sketches = sketches}};
  layer.summary_bytes = LayerSummaryBytes(layer);
  layer.block_stride = layer.layer_bytes();
  layer.key_summary_stride = layer.summary_stride();
  return layer;
}

}  // namespace moesaic::kernels
