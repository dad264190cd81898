// The blocks of one engine's KV cache as numbers with reference counts. The bytes are in a KvStore.
// docs/contracts/cache-blocks.md is normative.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "tensor/kv_layout.h"

namespace moesaic::cache {

using tensor::kKvBlockTokens;
using tensor::KvBlockAt;
using tensor::KvBlocksFor;
using tensor::KvBlockView;
using tensor::KvLayout;

class BlockPool;

/// A strong handle to one block. Copies retain, destruction releases; the last release returns the block to
/// the pool. Engine thread only. Must not outlive the pool.
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
  bool unique() const;  ///< This is the only handle: the block may be written.
  int references() const;

 private:
  friend class BlockPool;
  BlockRef(BlockPool* pool, int32_t index) : pool_(pool), index_(index) {}
  BlockPool* pool_ = nullptr;
  int32_t index_ = -1;
};

/// Block numbers, their references and marks. Allocates at most `blocks` at any time. Engine thread only.
class BlockPool {
 public:
  explicit BlockPool(int blocks);
  /// All blocks must have been released.
  ~BlockPool();
  BlockPool(const BlockPool&) = delete;
  BlockPool& operator=(const BlockPool&) = delete;

  /// Allocates the free block that was used last, whose pages are resident. ResourceExhausted: none is free.
  [[nodiscard]] StatusOr<BlockRef> Allocate();
  int total_blocks() const { return static_cast<int>(references_.size()); }
  int free_blocks() const { return static_cast<int>(free_.size()); }

  /// States whether one handle of `block` belongs to the radix tree. Such a block is *idle* while it has no
  /// other handle: it can be evicted.
  void SetCached(const BlockRef& block, bool cached);
  bool cached(int32_t index) const { return flags_[index] & kCached; }
  int idle_blocks() const { return idle_; }
  /// Takes the numbers of blocks that became idle since the last call; some may be in use again.
  std::vector<int32_t> TakeNewlyIdle();

  /// Marks a block as inexact until it is allocated again: its contents may differ from those that computing
  /// its tokens would give.
  void SetInexact(const BlockRef& block) { flags_[block.index()] |= kInexact; }
  bool inexact(int32_t index) const { return flags_[index] & kInexact; }
  /// States whether a block is absent: only its key summaries are sure to be in memory. A block is whole
  /// when it is allocated.
  void SetAbsent(int32_t index, bool absent);
  bool absent(int32_t index) const { return flags_[index] & kAbsent; }

 private:
  friend class BlockRef;
  static constexpr uint8_t kCached = 1, kListed = 2, kInexact = 4, kAbsent = 8;
  void Retain(int32_t index);
  void Release(int32_t index);
  void BecomeIdle(int32_t index);

  std::vector<int32_t> references_;  // [blocks]
  std::vector<int32_t> free_;        // a stack
  std::vector<uint8_t> flags_;       // [blocks]; kListed: it is in newly_idle_
  std::vector<int32_t> newly_idle_;
  int idle_ = 0;
};

}  // namespace moesaic::cache
