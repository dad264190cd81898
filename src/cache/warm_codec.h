// Blocks of the warm tier: keys and values in eight bits. docs/contracts/kv-tiers.md, W2, is the law.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cache/block_pool.h"

namespace moesaic::cache {

/// A layer of f32 or bf16 is [head][keys | values] in int8 and behind them an f32 scale for each of their
/// columns, which are one dimension of one KV head over the block's 64 tokens: an element is `scale * q`, q
/// from -127 to 127, off by half a scale at most, and by the pool's own rounding. Digests are not kept. A
/// layer that is kept as it is has all its bytes, and its summaries behind them.
class WarmCodec {
 public:
  /// `exact`: blocks are kept as they are, as those of int8 always are.
  WarmCodec(const KvLayout& layout, bool exact);

  bool exact() const { return exact_; }
  int64_t layer_bytes() const { return layer_bytes_; }
  int64_t block_bytes() const { return layout_.layers * layer_bytes_; }

  int layers() const { return layout_.layers; }

  /// Whether all elements of a layer are; those that are kept as they are need not be.
  bool IsFinite(const KvBlockView& block, int layer) const;
  /// From `block`, which is finite, into `to` [block_bytes()]. Layers may be coded at the same time.
  void Encode(const KvBlockView& block, int layer, std::byte* to) const;
  /// And back, but for summaries where the codec is not exact.
  void Decode(const std::byte* from, int layer, const KvBlockView& block) const;

 private:
  const KvLayout layout_;
  const bool exact_;
  const int64_t elements_;  // of a layer
  const int64_t layer_bytes_;
};

}  // namespace moesaic::cache
