// Changes of one entry of the block index. An entry maps the key of a block to the instances that have the
// block, with the tiers in which each has it: an inline word for a few instances, or a bit set for many.
// Instances are named by numbers. Only the library's own files include this header.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <optional>

#include "proxy/index/key_table.h"

namespace moesaic::proxy {

// A bit set with no more instances than this becomes an inline word again: less than an inline word holds, so
// that an instance that comes and leaves does not convert it each time.
inline constexpr int kInlineAgain = 2;

/// Returns the tiers of a number in a bit set.
inline uint32_t TiersInSet(const KeyTable& table, uint32_t set, int number) {
  const std::atomic<uint64_t>* const planes = table.Planes(set);
  const uint64_t stride = table.tier_stride();
  const uint32_t used = table.tiers_used();
  uint32_t tiers = 0;
  for (int t = 0; t < kNumTiers; ++t) {
    if ((used & 1U << t) == 0)
      continue;  // its plane was never written, and takes no memory while nothing reads it
    if ((planes[t * stride + number / 64].load(std::memory_order_relaxed) >> (number % 64) & 1) != 0)
      tiers |= 1U << t;
  }
  return tiers;
}

/// Sets the tiers of a number in a bit set; 0 removes the number.
inline void AssignInSet(const KeyTable& table, uint32_t set, int number, uint32_t tiers) {
  std::atomic<uint64_t>* const planes = table.Planes(set);
  const uint64_t stride = table.tier_stride();
  const uint64_t bit = uint64_t{1} << (number % 64);
  const uint32_t used = table.tiers_used() | tiers;
  for (int t = 0; t < kNumTiers; ++t) {
    if ((used & 1U << t) == 0) continue;
    std::atomic<uint64_t>& word = planes[t * stride + number / 64];
    const uint64_t old = word.load(std::memory_order_relaxed);
    const uint64_t changed = (tiers & 1U << t) != 0 ? old | bit : old & ~bit;
    if (changed != old) word.store(changed, std::memory_order_release);
  }
}

/// Returns the set as an inline word, if it has at most `most` numbers.
inline std::optional<SetWord> InlineOf(const KeyTable& table, uint32_t set, int most) {
  const std::atomic<uint64_t>* const planes = table.Planes(set);
  const uint32_t words = table.index().set_words, used = table.tiers_used();
  const uint64_t stride = table.tier_stride();
  SetWord word;
  int count = 0;
  for (uint32_t w = 0; w < words; ++w) {
    uint64_t any = 0;
    for (int t = 0; t < kNumTiers; ++t) {
      if ((used & 1U << t) != 0) any |= planes[t * stride + w].load(std::memory_order_relaxed);
    }
    count += std::popcount(any);
    if (count > most) return std::nullopt;
    for (; any != 0; any &= any - 1) {
      const int number = static_cast<int>(w) * 64 + std::countr_zero(any);
      word.Assign(number, TiersInSet(table, set, number));
    }
  }
  return word;
}

inline uint64_t Confirmed(uint32_t tiers) {
  return static_cast<uint64_t>(std::popcount(tiers & kConfirmedTiers));
}

/// Changes of the counters by one call. They are added at its end, as the counters are one cache line for all
/// writers. A process that dies before leaves statistics that are too low or too high by one call.
struct Changes {
  uint64_t blocks = 0, memberships = 0, dropped = 0;  // modulo 2^64

  void Count(uint32_t before, uint32_t after) { memberships += Confirmed(after) - Confirmed(before); }
  void AddTo(IndexLayout& index) const {
    if (blocks != 0) index.blocks.fetch_add(blocks, std::memory_order_relaxed);
    if (memberships != 0) index.memberships.fetch_add(memberships, std::memory_order_relaxed);
    if (dropped != 0) index.dropped.fetch_add(dropped, std::memory_order_relaxed);
  }
};

/// Removes the numbers of cleared instances from an inline word, which their owners do not use any more.
inline SetWord WithoutCleared(const KeyTable& table, SetWord word, Changes& changes) {
  for (int i = 0; i < SetWord::kInline; ++i) {
    const uint32_t tiers = SetWord::TiersOf(word.field(i));
    const int number = SetWord::NumberOf(word.field(i));
    if (tiers == 0 || table.OwnerOf(number) >= 0) continue;
    changes.Count(tiers, 0);
    word.Assign(number, 0);
  }
  return word;
}

/// Replaces the tiers of a number in the entry's set by `change(tiers)`. The caller holds the stripe. False
/// when a bit set is needed and none is free. Frees the entry when its set becomes empty.
template <typename Change>
bool Update(const KeyTable& table, KeyBucket::Entry& entry, int number, Changes& changes, Change change) {
  SetWord word(entry.set.load(std::memory_order_relaxed));
  uint32_t before = 0, after = 0;
  if (word.is_set()) {
    before = TiersInSet(table, word.set_number(), number);
    after = change(before);
    if (after == before) return true;
    AssignInSet(table, word.set_number(), number, after);
    changes.Count(before, after);
    if (after != 0) return true;
    const auto small = InlineOf(table, word.set_number(), kInlineAgain);
    if (!small) return true;
    entry.set.store(small->word(), std::memory_order_release);
    table.FreeSet(word.set_number());
    word = *small;
  } else {
    before = word.TiersFor(number);
    after = change(before);
    SetWord changed = word;
    bool fits = changed.Assign(number, after);
    if (!fits) {
      changed = WithoutCleared(table, word, changes);
      entry.set.store(changed.word(), std::memory_order_release);
      word = changed;
      fits = changed.Assign(number, after);
    }
    if (fits) {
      if (changed.word() != word.word()) entry.set.store(changed.word(), std::memory_order_release);
      word = changed;
    } else {
      const auto set = table.TakeSet();
      if (!set) return false;
      for (int i = 0; i < SetWord::kInline; ++i)
        AssignInSet(table, *set, SetWord::NumberOf(word.field(i)), SetWord::TiersOf(word.field(i)));
      AssignInSet(table, *set, number, after);
      const uint32_t tag = table.index().set_tag.fetch_add(1, std::memory_order_relaxed);
      word = SetWord::OfSet(*set, tag);
      entry.set.store(word.word(), std::memory_order_release);
    }
    changes.Count(before, after);
  }
  if (word.empty()) {
    entry.key.store(0, std::memory_order_release);
    --changes.blocks;
  }
  return true;
}

}  // namespace moesaic::proxy
