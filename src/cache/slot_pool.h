// Slots of memory outside the KV cache, as numbers: each has room for one block. The bytes are in a KvStore.
#pragma once

#include <memory>
#include <vector>

namespace moesaic::cache {

class SlotPool;

/// Holds one slot, which becomes free with the last reference.
class Slot {
 public:
  Slot(SlotPool& pool, int index) : pool_(pool), index_(index) {}
  ~Slot();
  Slot(const Slot&) = delete;
  Slot& operator=(const Slot&) = delete;
  int index() const { return index_; }

 private:
  SlotPool& pool_;
  const int index_;
};
using SlotRef = std::shared_ptr<const Slot>;  ///< Must not outlive the pool.

/// Engine thread only.
class SlotPool {
 public:
  explicit SlotPool(int slots);
  /// All slots must have been released.
  ~SlotPool();
  SlotPool(const SlotPool&) = delete;
  SlotPool& operator=(const SlotPool&) = delete;

  /// Takes a slot; null: none is free.
  SlotRef Take();
  int total() const { return total_; }
  int used() const { return total_ - static_cast<int>(free_.size()); }

 private:
  friend class Slot;
  const int total_;
  std::vector<int> free_;  // a stack
};

}  // namespace moesaic::cache
