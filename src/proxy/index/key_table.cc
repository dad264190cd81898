#include "proxy/index/key_table.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "base/round.h"

namespace moesaic::proxy {
namespace {

constexpr uint64_t kLow = 0xffffffffU;

std::atomic<uint32_t>& NextOf(const Zone& zone, uint32_t set) {
  return zone.At<std::atomic<uint32_t>>(zone.index().set_next)[set];
}

// A key goes into the emptier of two buckets of four. At a load of 0.55, both are full for fewer than one key
// in 1,000.
uint64_t BucketsFor(uint64_t entries) {
  return std::max<uint64_t>(base::CeilDiv(entries * 5, uint64_t{11}), 16);
}

uint64_t PowerOfTwoFor(uint64_t count) {
  uint64_t power = 64;
  while (power < count) power *= 2;
  return power;
}

// Zeroes memory. Whole pages of a shared mapping are given back instead, so that a large table takes memory
// only as it fills.
void MakeZero(std::byte* memory, size_t bytes) {
  constexpr size_t kPage = 4096;
  const size_t before = std::min(bytes, (kPage - reinterpret_cast<uintptr_t>(memory) % kPage) % kPage);
  const size_t pages = (bytes - before) / kPage * kPage;
  if (pages > 0 && madvise(memory + before, pages, MADV_REMOVE) == 0) {
    std::memset(memory, 0, before);
    std::memset(memory + before + pages, 0, bytes - before - pages);
  } else {
    std::memset(memory, 0, bytes);
  }
}

}  // namespace

uint64_t PlaceIndex(const ZoneOptions& options, uint64_t offset, IndexLayout* layout) {
  const uint64_t key_buckets = BucketsFor(options.index_blocks),
                 hash_buckets = BucketsFor(options.engine_blocks);
  const uint64_t words = base::CeilDiv(options.max_instances + kSpareNumbers, 64U);
  const uint64_t keys = base::RoundUp(offset, uint64_t{64});
  const uint64_t hashes = keys + key_buckets * sizeof(KeyBucket);
  const uint64_t sets = hashes + hash_buckets * sizeof(HashBucket);
  const uint64_t next = sets + options.shared_blocks * kNumTiers * words * sizeof(uint64_t);
  const uint64_t expected = base::RoundUp(next + options.shared_blocks * sizeof(uint32_t), uint64_t{64});
  const uint64_t capacity = PowerOfTwoFor(options.speculative_blocks);
  if (layout != nullptr) {
    layout->key_buckets = keys;
    layout->hash_buckets = hashes;
    layout->num_key_buckets = key_buckets;
    layout->num_hash_buckets = hash_buckets;
    layout->sets = sets;
    layout->set_next = next;
    layout->num_sets = static_cast<uint32_t>(options.shared_blocks);
    layout->set_words = static_cast<uint32_t>(words);
    layout->numbers.count = static_cast<uint32_t>(words * 64);
    layout->expected = expected;
    layout->expected_capacity = capacity;
  }
  return expected + capacity * sizeof(Expected);
}

void FormatIndex(const Zone& zone) {
  IndexLayout& index = zone.index();
  for (RobustLock& stripe : index.stripes) stripe.Init();
  index.expectations.Init();
  index.writers.Init();
  for (uint32_t i = 0; i < zone.options().max_instances; ++i) {
    index.numbers.number_of[i].store(static_cast<uint16_t>(i), std::memory_order_relaxed);
    index.numbers.owner_of[i].store(static_cast<uint16_t>(i + 1), std::memory_order_relaxed);
  }
  MakeZero(zone.base() + index.key_buckets, index.expected - index.key_buckets);
  for (uint32_t i = 0; i < index.num_sets; ++i) NextOf(zone, i).store(i + 1 < index.num_sets ? i + 2 : 0);
  index.free_set.store(index.num_sets > 0 ? 1 : 0, std::memory_order_release);
}

std::optional<uint32_t> KeyTable::TakeSet() const {
  uint64_t head = index_.free_set.load(std::memory_order_acquire);
  for (;;) {
    const auto number = static_cast<uint32_t>(head & kLow);
    if (number == 0) return std::nullopt;
    const uint32_t next = NextOf(zone_, number - 1).load(std::memory_order_relaxed);
    const uint64_t replaced = ((head >> 32) + 1) << 32 | next;
    if (index_.free_set.compare_exchange_weak(head, replaced, std::memory_order_acq_rel)) {
      index_.sets_used.fetch_add(1, std::memory_order_relaxed);
      std::atomic<uint64_t>* const planes = Planes(number - 1);
      for (uint32_t t = 0; t < kNumTiers; ++t) {
        if ((tiers_used() & 1U << t) == 0) continue;
        for (uint32_t w = 0; w < index_.set_words; ++w)
          planes[t * tier_stride() + w].store(0, std::memory_order_relaxed);
      }
      return number - 1;
    }
  }
}

void KeyTable::FreeSet(uint32_t set) const {
  uint64_t head = index_.free_set.load(std::memory_order_acquire);
  for (;;) {
    NextOf(zone_, set).store(static_cast<uint32_t>(head & kLow), std::memory_order_relaxed);
    const uint64_t replaced = ((head >> 32) + 1) << 32 | (set + 1);
    if (index_.free_set.compare_exchange_weak(head, replaced, std::memory_order_acq_rel)) break;
  }
  index_.sets_used.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace moesaic::proxy
