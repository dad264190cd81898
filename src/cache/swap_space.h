// Memory beside the KV pool for blocks whose contents will be wanted again though the pool has no room for
// them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "cache/kv_pool.h"
#include "runtime/memory.h"

namespace moesaic::cache {

class SwapSpace;

/// Holds one place of the space, which is free again when the last reference goes.
class SwapSlot {
 public:
  SwapSlot(SwapSpace& space, int index) : space_(space), index_(index) {}
  ~SwapSlot();
  SwapSlot(const SwapSlot&) = delete;
  SwapSlot& operator=(const SwapSlot&) = delete;

 private:
  friend class SwapSpace;
  SwapSpace& space_;
  const int index_;
};
using SwapRef = std::shared_ptr<const SwapSlot>;  ///< must not outlive the space

/// Engine thread only. Pages are touched only when a place is first used.
class SwapSpace {
 public:
  /// As many places of `slot_bytes`, one block's, as fit `bytes`; fails if not even one does.
  static StatusOr<std::unique_ptr<SwapSpace>> Create(int64_t slot_bytes, int64_t bytes);
  /// Every place must have come back.
  ~SwapSpace();
  SwapSpace(const SwapSpace&) = delete;
  SwapSpace& operator=(const SwapSpace&) = delete;

  /// A place for who writes and reads it by At; null when none is free.
  SwapRef Take();
  std::byte* At(const SwapSlot& slot) { return memory_.data() + slot.index_ * slot_bytes_; }
  /// Copies a block of `pool`, whose total_bytes() places have, in with its summaries; null when no place is
  /// free.
  SwapRef Put(const KvPool& pool, int32_t block);
  /// Copies it back, with its summaries.
  void Get(const SwapSlot& slot, const KvPool& pool, int32_t block);

  int total_blocks() const { return total_; }
  int used_blocks() const { return total_ - static_cast<int>(free_.size()); }
  int64_t blocks_out() const { return out_; }  ///< Put, ever
  int64_t blocks_in() const { return in_; }    ///< Get, ever
  /// What copying one block one way took of late.
  double copy_seconds() const { return copy_seconds_; }

 private:
  friend class SwapSlot;
  SwapSpace(int64_t slot_bytes, int blocks, runtime::Buffer memory);
  void Copy(const KvLayout& layout, const KvBlockView& from, const KvBlockView& to);

  const int64_t slot_bytes_;
  const int total_;
  runtime::Buffer memory_;
  std::vector<int> free_;  // a stack
  int64_t out_ = 0, in_ = 0;
  double copy_seconds_;
};

}  // namespace moesaic::cache
