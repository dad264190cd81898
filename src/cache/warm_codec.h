// The format of warm blocks: keys and values in int8. docs/contracts/kv-tiers.md, W2, is normative.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cache/block_pool.h"

namespace moesaic::cache {

/// A layer of f32 or bf16 is stored as int8 [head][keys | values], followed by an f32 scale for each column:
/// one dimension of one KV head over the block's 64 tokens. An element is `scale * q`, q from -127 to 127; it
/// is off by at most half a scale and the rounding of the cache's type. Key summaries are not stored. An
/// exact layer has all its bytes, followed by its key summaries.
class WarmCodec {
 public:
  /// `exact`: blocks are stored as they are; int8 blocks always are.
  WarmCodec(const KvLayout& layout, bool exact);

  bool exact() const { return exact_; }
  int64_t layer_bytes() const { return layer_bytes_; }
  int64_t block_bytes() const { return layout_.layers * layer_bytes_; }

  int layers() const { return layout_.layers; }

  /// Returns whether all elements of a layer are finite. True for exact layers, which need not be.
  bool IsFinite(const KvBlockView& block, int layer) const;
  /// Encodes a layer of `block`, which is finite, into `to` [block_bytes()]. Different layers may be encoded
  /// in parallel.
  void Encode(const KvBlockView& block, int layer, std::byte* to) const;
  /// Decodes a layer; without key summaries unless the codec is exact.
  void Decode(const std::byte* from, int layer, const KvBlockView& block) const;

 private:
  const KvLayout layout_;
  const bool exact_;
  const int64_t elements_;  // of a layer
  const int64_t layer_bytes_;
};

}  // namespace moesaic::cache
