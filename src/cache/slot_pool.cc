#include "cache/slot_pool.h"

#include "base/check.h"

namespace moesaic::cache {

Slot::~Slot() { pool_.free_.push_back(index_); }

SlotPool::SlotPool(int slots) : total_(slots), free_(slots) {
  for (int i = 0; i < slots; ++i) free_[i] = slots - 1 - i;
}

SlotPool::~SlotPool() { MOESAIC_CHECK_EQ(static_cast<int>(free_.size()), total_); }

SlotRef SlotPool::Take() {
  if (free_.empty()) return nullptr;
  const int index = free_.back();
  free_.pop_back();
  return std::make_shared<const Slot>(*this, index);
}

}  // namespace moesaic::cache
