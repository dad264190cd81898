// Where the parts of a KV block stand when it holds one layer alone.
#pragma once

#include "kernels/ops.h"
#include "kernels/sketch.h"

namespace moesaic::kernels {

/// Bytes of one KV head's digest in a block.
inline int64_t DigestBytes(const KvLayer& cache) {
  return DigestBytes(cache.key_dim, KeySplit(cache), cache.sketches);
}

/// A layer of `heads` KV heads whose block is keys, values, scales (kI8) and, with `digests`, digests (with
/// sketches or without), one after another: all but its base. block_stride is what they take, rounded up
/// to 64.
inline KvLayer LayOutKv(tensor::DType dtype, int heads, int key_dim, int value_dim, bool shared,
                        bool digests = false, bool sketches = false) {
  const int64_t tokens = int64_t{heads} * kKvBlockTokens;
  const int64_t keys = tensor::BytesOf(dtype, tokens * key_dim);
  const int64_t values = shared ? 0 : tensor::BytesOf(dtype, tokens * value_dim);
  const int64_t scales = dtype == tensor::DType::kI8 ? 2 * tokens * static_cast<int64_t>(sizeof(float)) : 0;
  const int64_t digests_at = keys + values + scales;
  const int64_t end =
      digests_at + (digests ? heads * DigestBytes(key_dim, shared ? value_dim : key_dim, sketches) : 0);
  return {.base = nullptr,
          .block_stride = (end + 63) / 64 * 64,
          .value_offset = shared ? 0 : keys,
          .scale_offset = keys + values,
          .digest_offset = digests ? digests_at : 0,
          .dtype = dtype,
          .heads = heads,
          .key_dim = key_dim,
          .value_dim = value_dim,
          .shared = shared,
          .sketches = digests && sketches};
}

}  // namespace moesaic::kernels
