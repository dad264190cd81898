// What may be evicted, in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace moesaic::cache {

/// Entries of a worth, the least first, and entries that will be asked for at a known time. Neither owns what
/// is in it, which must stay where it is until it is withdrawn.
class EvictionQueue {
 public:
  /// The place of one thing that may go.
  struct Entry {
    bool queued() const { return slot_ != kNowhere || number_ != 0; }

   private:
    friend class EvictionQueue;
    double key_ = 0;          // its worth, or when it returns
    size_t slot_ = kNowhere;  // in heap_
    uint64_t number_ = 0;     // in away_; 0: it is not there
  };

  bool empty() const { return heap_.empty() && away_.empty(); }
  void AddWorth(Entry& entry, double worth);
  void AddAway(Entry& entry, double returns_at);
  void Withdraw(Entry& entry);  ///< which is queued

  /// The entry whose return is the first, if that is at `now` or before; null: none.
  Entry* Due(double now) const;
  /// What goes first at `now`, by the rule of EvictionPolicy::ReturnsAt; null: there is none.
  Entry* First(double now) const;

  void CheckStructure() const;  ///< aborts when a rule of it doesn't hold; for tests

 private:
  static constexpr size_t kNowhere = ~size_t{0};

  void SiftUp(size_t slot);
  void SiftDown(size_t slot);
  void PutAt(size_t slot, Entry* entry);

  std::vector<Entry*> heap_;                            // the least worth on top
  std::map<std::pair<double, uint64_t>, Entry*> away_;  // by return; of equals the first to come in
  uint64_t numbers_ = 0;
};

}  // namespace moesaic::cache
