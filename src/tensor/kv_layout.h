// The layout of KV cache blocks, shared by the kernels that read them, the store that owns them and the files
// that keep them. docs/contracts/cache-blocks.md is normative.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/round.h"
#include "tensor/dtype.h"

namespace moesaic::tensor {

inline constexpr int kKvBlockTokens = 64;  ///< Tokens per KV block.

/// Returns the number of blocks that hold `tokens` tokens of one sequence.
constexpr int KvBlocksFor(int64_t tokens) { return static_cast<int>(base::CeilDiv(tokens, kKvBlockTokens)); }

/// Returns the tokens of block `index` of a sequence, [kKvBlockTokens].
inline std::span<const int32_t> KvBlockAt(std::span<const int32_t> tokens, size_t index) {
  return tokens.subspan(index * kKvBlockTokens, kKvBlockTokens);
}

/// Returns the tokens of the first `blocks` blocks of a sequence, [blocks * kKvBlockTokens].
inline std::span<const int32_t> KvTokensOf(std::span<const int32_t> tokens, size_t blocks) {
  return tokens.first(blocks * kKvBlockTokens);
}

/// Address of one block. Its layers are contiguous; its key summaries are stored elsewhere.
struct KvBlockView {
  std::byte* data = nullptr;       // [layers][layer_bytes]
  std::byte* summaries = nullptr;  // key summaries of the first layer; null: there are none
  int64_t summary_step = 0;        // bytes from one layer's summaries to those of the next
};

/// Shape and strides of one KV block. All layers of a token are in the same block: [layer][head][keys |
/// values], keys [64][key_dim] and values [64][value_dim], so that a head that reads this block and not the
/// next finds all in one place. kI8 appends f32 scales [2][heads][64] to each layer: an element is scale * q
/// with q in [-127, 127].
///
/// MLA stores one row per token, latent then rope: one head, and values are the first value_dim elements of
/// the keys. Its two scales per token belong to those and to the rest of the key.
struct KvLayout {
  int layers = 1;
  int heads = 0;  // KV heads
  int key_dim = 0, value_dim = 0;
  bool shared = false;        // values are a prefix of the keys (MLA)
  DType dtype = DType::kF32;  // kF32, kBF16 or kI8
  int64_t summary_bytes = 0;  // key summaries of one layer and block, all heads; 0: there are none
  bool sketches = false;      // key summaries contain sketches

  static constexpr int64_t kAlignment = 64;  // bytes: one cache line, one AVX-512 register

  int64_t element_bytes() const { return dtype == DType::kF32 ? 4 : dtype == DType::kBF16 ? 2 : 1; }
  /// Returns the bytes of the keys of one layer and head.
  int64_t head_keys_bytes() const { return int64_t{kKvBlockTokens} * key_dim * element_bytes(); }
  /// Returns the bytes from one head's keys to those of the next head.
  int64_t head_stride() const {
    const int64_t dims = shared ? key_dim : int64_t{key_dim} + value_dim;
    return kKvBlockTokens * dims * element_bytes();
  }
  /// Returns the bytes from a head's keys to its values.
  int64_t value_offset() const { return shared ? 0 : head_keys_bytes(); }
  int64_t keys_bytes() const { return heads * head_keys_bytes(); }               ///< Keys of one layer.
  int64_t values_bytes() const { return heads * head_stride() - keys_bytes(); }  ///< Values of one layer.
  /// Returns the bytes from a layer's first key to its scales (kI8).
  int64_t scale_offset() const { return heads * head_stride(); }
  int64_t scales_bytes() const {
    return dtype == DType::kI8 ? int64_t{2} * heads * kKvBlockTokens * int64_t{sizeof(float)} : 0;
  }
  int64_t layer_bytes() const { return base::RoundUp(scale_offset() + scales_bytes(), kAlignment); }
  int64_t block_bytes() const { return layers * layer_bytes(); }
  /// Returns the bytes between the key summaries of two blocks of a layer.
  int64_t summary_stride() const { return base::RoundUp(summary_bytes, kAlignment); }
  /// Returns the bytes that budgets count for one block: the block and its key summaries in all layers.
  int64_t total_bytes() const { return block_bytes() + layers * summary_stride(); }

  /// Views a block stored alone in [total_bytes()]: its layers, then their key summaries.
  KvBlockView Flat(std::byte* memory) const;
  /// Copies a block with its key summaries.
  void Copy(const KvBlockView& from, const KvBlockView& to) const;
  /// Copies keys, values and scales of the first `tokens` slots, without key summaries.
  void CopyTokens(const KvBlockView& from, const KvBlockView& to, int tokens) const;
};

}  // namespace moesaic::tensor
