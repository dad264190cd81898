// Where the parts of a KV block stand when it holds one layer alone.
#pragma once

#include "kernels/attention.h"
#include "kernels/sketch.h"

namespace moesaic::kernels {

/// Bytes of one KV head's digest of a block.
inline int64_t KeySummaryBytes(const KvLayer& cache) {
  return KeySummaryBytes(cache.key_dim, KeySplit(cache), cache.sketches);
}

/// A layer of `heads` KV heads whose block is each head's keys and values, then scales (kI8): all but its
/// memory, `base` and `digests`. block_stride is what they take, rounded up to 64, and digest_stride what
/// digests take (with sketches or without), likewise.
inline KvLayer LayOutKv(tensor::DType dtype, int heads, int key_dim, int value_dim, bool shared,
                        bool sketches = false) {
  const int64_t keys = tensor::BytesOf(dtype, int64_t{kKvBlockTokens} * key_dim);
  const int64_t values = shared ? 0 : tensor::BytesOf(dtype, int64_t{kKvBlockTokens} * value_dim);
  const int64_t floats = dtype == tensor::DType::kI8 ? int64_t{2} * heads * kKvBlockTokens : 0;
  const int64_t scales = floats * static_cast<int64_t>(sizeof(float));
  const int64_t digests = heads * KeySummaryBytes(key_dim, shared ? value_dim : key_dim, sketches);
  return {.base = nullptr,
          .block_stride = (heads * (keys + values) + scales + 63) / 64 * 64,
          .head_stride = keys + values,
          .value_offset = shared ? 0 : keys,
          .scale_offset = heads * (keys + values),
          .digests = nullptr,
          .digest_stride = (digests + 63) / 64 * 64,
          .dtype = dtype,
          .heads = heads,
          .key_dim = key_dim,
          .value_dim = value_dim,
          .shared = shared,
          .sketches = sketches};
}

}  // namespace moesaic::kernels
