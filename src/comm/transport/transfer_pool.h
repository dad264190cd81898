// Storage of the transfers of one rank: slots that are reused, with a generation that detects ids of ended
// transfers.
#pragma once

#include <cstddef>
#include <deque>
#include <vector>

#include "base/check.h"
#include "comm/transport/transport.h"

namespace moesaic::comm {

/// Slots of type T, which has a member `uint32_t slot` and a member `uint32_t generation`. Addresses are
/// stable. It allocates memory only when more transfers are in flight than ever before. One thread.
template <typename T>
class TransferPool {
 public:
  T& Take() {
    if (free_.empty()) {
      T& added = slots_.emplace_back();
      added.slot = static_cast<uint32_t>(slots_.size() - 1);
      if (free_.capacity() < slots_.size()) free_.reserve(2 * slots_.size());
      return added;
    }
    T& reused = slots_[free_.back()];
    free_.pop_back();
    return reused;
  }
  /// The transfer of `id`, which must not have ended.
  T& At(TransferId id) {
    MOESAIC_CHECK_LT(id.slot, slots_.size());
    T& found = slots_[id.slot];
    MOESAIC_CHECK_EQ(id.generation, found.generation);
    return found;
  }
  void Return(T& transfer) {
    ++transfer.generation;
    free_.push_back(transfer.slot);
  }
  /// Calls use(transfer) for every slot, whose transfer may have been returned.
  template <typename Use>
  void ForEachSlot(const Use& use) const {
    for (const T& slot : slots_) use(slot);
  }
  static TransferId Id(const T& transfer) { return {transfer.slot, transfer.generation}; }
  size_t in_use() const { return slots_.size() - free_.size(); }

 private:
  std::deque<T> slots_;
  std::vector<uint32_t> free_;
};

}  // namespace moesaic::comm
