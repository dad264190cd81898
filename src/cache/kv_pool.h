// The KV cache of one engine: a pool of fixed blocks of 64 tokens, handed out as reference-counted handles.
// docs/contracts/cache-blocks.md is the law.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "runtime/memory.h"
#include "tensor/kv_layout.h"

namespace moesaic::cache {

using tensor::kKvBlockTokens;
using tensor::KvBlockAt;
using tensor::KvBlocksFor;
using tensor::KvBlockView;
using tensor::KvLayout;

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

/// Owns the memory of blocks and summaries (huge pages) and reference counts. Never hands out more than it has.
/// Counts cost one integer a block; pages are touched only when a block is first written.
class KvPool {
 public:
  /// Sizes the pool from a budget: as many whole blocks as fit `bytes`; fails if not even one does.
  static StatusOr<std::unique_ptr<KvPool>> Create(const KvLayout& layout, int64_t bytes);
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
  /// No summaries: a block that is not full has none that is read.
  void CopyTokens(const BlockRef& from, const BlockRef& to, int tokens);

  const KvLayout& layout() const { return layout_; }
  std::byte* base() const { return memory_.data(); }
  std::byte* At(int32_t block) const { return base() + block * layout_.block_bytes(); }
  /// Those of block 0 in this layer: they lie [layer][block][summary_stride()], so that who reads one layer's
  /// of many blocks touches few pages. Null: there are none.
  std::byte* summaries(int layer) const;
  KvBlockView ViewOf(int32_t block) const;

 private:
  friend class BlockRef;
  KvPool(const KvLayout& layout, runtime::Buffer memory, runtime::Buffer summaries, int blocks);
  static constexpr uint8_t kCached = 1, kListed = 2, kLossy = 4;
  void Retain(int32_t index);
  void Release(int32_t index);
  void BecomeIdle(int32_t index);

  KvLayout layout_;
  runtime::Buffer memory_, summaries_;
  std::vector<int32_t> references_;  // [blocks]
  std::vector<int32_t> free_;        // a stack
  std::vector<uint8_t> flags_;       // [blocks] kCached; kListed: stands in newly_idle_; kLossy
  std::vector<int32_t> newly_idle_;
  int idle_ = 0;
};

}  // namespace moesaic::cache
