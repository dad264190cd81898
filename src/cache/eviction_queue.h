// The queue of nodes that may be evicted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace moesaic::cache {

/// Orders entries by worth, the least first, and entries with a predicted use by time. Borrows its entries,
/// which must not move until they are withdrawn.
class EvictionQueue {
 public:
  /// Position of one node in the queue.
  struct Entry {
    bool queued() const { return slot_ != kNowhere || number_ != 0; }

   private:
    friend class EvictionQueue;
    double key_ = 0;          // its worth, or the time of its predicted use
    double last_use_ = 0;     // of entries with a worth
    size_t slot_ = kNowhere;  // in heap_
    uint64_t number_ = 0;     // in away_; 0: it is not in away_
  };

  bool empty() const { return heap_.empty() && away_.empty(); }
  void AddWorth(Entry& entry, double worth, double last_use);
  void AddAway(Entry& entry, double returns_at);
  void Withdraw(Entry& entry);  ///< `entry` must be queued.

  /// The entry with the earliest predicted use, if that is at `now` or before; null: none.
  Entry* Due(double now) const;
  /// The entry to evict first at `now`, by the rule of EvictionPolicy::ReturnsAt; null: there is none.
  Entry* First(double now) const;

  void CheckStructure() const;  ///< Aborts if a rule of the structure does not hold. For tests.

 private:
  static constexpr size_t kNowhere = ~size_t{0};

  void SiftUp(size_t slot);
  void SiftDown(size_t slot);
  void PutAt(size_t slot, Entry* entry);

  std::vector<Entry*> heap_;                            // the least worth on top
  std::map<std::pair<double, uint64_t>, Entry*> away_;  // by predicted use; equals by order of insertion
  uint64_t numbers_ = 0;
};

}  // namespace moesaic::cache
