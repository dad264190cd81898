#include "cache/eviction_queue.h"

#include <algorithm>

#include "base/check.h"
#include "cache/eviction.h"

namespace moesaic::cache {

void EvictionQueue::PutAt(size_t slot, Entry* entry) {
  heap_[slot] = entry;
  entry->slot_ = slot;
}

void EvictionQueue::SiftUp(size_t slot) {
  Entry* const entry = heap_[slot];
  for (; slot > 0 && entry->key_ < heap_[(slot - 1) / 2]->key_; slot = (slot - 1) / 2) {
    PutAt(slot, heap_[(slot - 1) / 2]);
  }
  PutAt(slot, entry);
}

void EvictionQueue::SiftDown(size_t slot) {
  Entry* const entry = heap_[slot];
  for (;;) {
    size_t child = 2 * slot + 1;
    if (child >= heap_.size()) break;
    if (child + 1 < heap_.size() && heap_[child + 1]->key_ < heap_[child]->key_) ++child;
    if (entry->key_ <= heap_[child]->key_) break;
    PutAt(slot, heap_[child]);
    slot = child;
  }
  PutAt(slot, entry);
}

void EvictionQueue::AddWorth(Entry& entry, double worth, double last_use) {
  entry.key_ = worth;
  entry.last_use_ = last_use;
  heap_.push_back(&entry);
  SiftUp(heap_.size() - 1);
}

void EvictionQueue::AddAway(Entry& entry, double returns_at) {
  entry.key_ = returns_at;
  entry.number_ = ++numbers_;
  away_.emplace(std::pair(returns_at, entry.number_), &entry);
}

void EvictionQueue::Withdraw(Entry& entry) {
  if (entry.number_ != 0) {
    away_.erase({entry.key_, std::exchange(entry.number_, 0)});
    return;
  }
  const size_t slot = std::exchange(entry.slot_, kNowhere);
  Entry* const last = heap_.back();
  heap_.pop_back();
  if (last == &entry) return;
  PutAt(slot, last);
  SiftUp(slot);
  SiftDown(last->slot_);
}

EvictionQueue::Entry* EvictionQueue::Due(double now) const {
  return away_.empty() || away_.begin()->first.first > now ? nullptr : away_.begin()->second;
}

EvictionQueue::Entry* EvictionQueue::First(double now) const {
  if (away_.empty()) return heap_.empty() ? nullptr : heap_.front();
  Entry* const latest = away_.rbegin()->second;
  if (heap_.empty()) return latest;
  // An entry worth less than its last use is evicted first in any case; one worth more still has the age of
  // its last use.
  Entry* const least = heap_.front();
  const double age = now - std::min(least->key_, least->last_use_);
  return latest->key_ - now >= kAwayPerAge * age ? latest : least;
}

void EvictionQueue::CheckStructure() const {
  for (size_t i = 0; i < heap_.size(); ++i) {
    MOESAIC_CHECK(heap_[i]->slot_ == i && heap_[i]->number_ == 0);
    if (i > 0) MOESAIC_CHECK(heap_[(i - 1) / 2]->key_ <= heap_[i]->key_);
  }
  for (const auto& [key, entry] : away_) {
    MOESAIC_CHECK(key == std::pair(entry->key_, entry->number_) && entry->slot_ == kNowhere);
  }
}

}  // namespace moesaic::cache
