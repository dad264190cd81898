// The KV cache of one engine: a pool of fixed blocks of 64 tokens, handed out as reference-counted handles.
// docs/contracts/cache-blocks.md is the law.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/round.h"
#include "base/status.h"
#include "runtime/memory.h"
#include "tensor/dtype.h"

namespace moesaic::cache {

inline constexpr int kBlockTokens = 64;

/// Blocks that hold `tokens` tokens of one sequence.
constexpr int BlocksFor(int64_t tokens) { return static_cast<int>(base::CeilDiv(tokens, kBlockTokens)); }

/// The tokens of block `index` of a sequence's.
inline std::span<const int32_t> BlockAt(std::span<const int32_t> tokens, size_t index) {
  return tokens.subspan(index * kBlockTokens, kBlockTokens);
}

/// Where one block stands: its layers one behind the other, and their digests elsewhere.
struct BlockView {
  std::byte* data = nullptr;     // [layers][layer_bytes]
  std::byte* digests = nullptr;  // of the first layer; null: there are none
  int64_t digest_step = 0;       // bytes from one layer's digests to those of the next
};

/// Bytes and strides of one block. All layers of a token lie in the same block: [layer][head][keys |
/// values], kI8: [layer]([head][keys | values] | scales). Digests of the keys, if there are any, stand beside
/// the blocks.
struct BlockLayout {
  int layers = 0;
  int heads = 0;
  int key_dim = 0, value_dim = 0;
  bool shared = false;                        // MLA: no values of their own
  tensor::DType dtype = tensor::DType::kF32;  // kF32, kBF16 or kI8
  int64_t digest_bytes = 0;  // of one layer, all heads: what attention over chosen blocks needs
  bool sketches = false;     // digests have them

  int64_t keys_bytes() const;     // of one layer: heads * 64 * key_dim elements
  int64_t values_bytes() const;   // of one layer, 0 when shared
  int64_t head_bytes() const;     // of one layer and head: keys and values
  int64_t value_offset() const;   // from a head's keys to its values, 0 when shared
  int64_t scales_bytes() const;   // of one layer: f32 [2][heads][64] with kI8, else 0
  int64_t layer_bytes() const;    // keys, values and scales of one layer, 64-byte aligned
  int64_t block_bytes() const;    // layers * layer_bytes
  int64_t digest_stride() const;  // digest_bytes, 64-byte aligned
  int64_t pool_bytes() const;     // block_bytes and the digests of all layers: what budgets count

  /// A block that stands alone in [pool_bytes()]: its layers, and behind them their digests.
  BlockView Flat(std::byte* memory) const;
  /// Copies a block with its digests. Nobody writes to `from`.
  void Copy(const BlockView& from, const BlockView& to) const;
};

class KvPool;

/// A strong handle to one block. Copies retain, destruction releases; the block returns to the pool with the
/// last. Engine thread only. Must not outlive the pool.
class BlockRef {
 public:
  BlockRef() = default;
  BlockRef(const BlockRef& other);
  BlockRef& operator=(const BlockRef& other);
  BlockRef(BlockRef&& other) noexcept;
  BlockRef& operator=(BlockRef&& other) noexcept;
  ~BlockRef();

  explicit operator bool() const { return pool_ != nullptr; }
  int32_t index() const { return index_; }
  bool unique() const;  ///< nobody else holds it: it may be written
  int references() const;

 private:
  friend class KvPool;
  BlockRef(KvPool* pool, int32_t index) : pool_(pool), index_(index) {}
  KvPool* pool_ = nullptr;
  int32_t index_ = -1;
};

/// Owns the memory of blocks and digests (huge pages) and reference counts. Never hands out more than it has.
/// Counts cost one integer a block; pages are touched only when a block is first written.
class KvPool {
 public:
  /// Sizes the pool from a budget: as many whole blocks as fit `bytes`; fails if not even one does.
  static StatusOr<std::unique_ptr<KvPool>> Create(const BlockLayout& layout, int64_t bytes);
  /// Every block must have come back.
  ~KvPool();
  KvPool(const KvPool&) = delete;
  KvPool& operator=(const KvPool&) = delete;

  /// The free block that was used last, whose pages are there already. ResourceExhausted when no block is
  /// free.
  [[nodiscard]] StatusOr<BlockRef> Allocate();
  int total_blocks() const { return static_cast<int>(references_.size()); }
  int free_blocks() const { return static_cast<int>(free_.size()); }

  /// Says that one of the handles of `block` is the cache's (or no longer is). Such a block is idle while it
  /// has no other handle: nobody needs it, and the cache may let it go.
  void SetCached(const BlockRef& block, bool cached);
  bool cached(int32_t index) const { return flags_[index] & kCached; }
  int idle_blocks() const { return idle_; }
  /// Says that what stands in `block` is not what computing its tokens would give: until it is handed out
  /// again.
  void SetLossy(const BlockRef& block) { flags_[block.index()] |= kLossy; }
  bool lossy(int32_t index) const { return flags_[index] & kLossy; }
  /// Takes the numbers of the blocks that have become idle since the last call; some may no longer be.
  std::vector<int32_t> TakeNewlyIdle();

  /// Copies keys and values of the first `tokens` slots of `from` into those of `to`, which must be unique().
  /// No digests: a block that is not full has none that is read.
  void CopyTokens(const BlockRef& from, const BlockRef& to, int tokens);

  const BlockLayout& layout() const { return layout_; }
  std::byte* base() const { return memory_.data(); }
  std::byte* At(int32_t block) const { return base() + block * layout_.block_bytes(); }
  /// Those of block 0 in this layer: they lie [layer][block][digest_stride()], so that who reads one layer's
  /// of many blocks touches few pages. Null: there are none.
  std::byte* digests(int layer) const;
  BlockView ViewOf(int32_t block) const;

 private:
  friend class BlockRef;
  KvPool(const BlockLayout& layout, runtime::Buffer memory, runtime::Buffer digests, int blocks);
  static constexpr uint8_t kCached = 1, kListed = 2, kLossy = 4;
  void Retain(int32_t index);
  void Release(int32_t index);
  void BecomeIdle(int32_t index);

  BlockLayout layout_;
  runtime::Buffer memory_, digests_;
  std::vector<int32_t> references_;  // [blocks]
  std::vector<int32_t> free_;        // a stack
  std::vector<uint8_t> flags_;       // [blocks] kCached; kListed: stands in newly_idle_; kLossy
  std::vector<int32_t> newly_idle_;
  int idle_ = 0;
};

}  // namespace moesaic::cache
