// Access to the tables of the index. Only the library's own files include this header.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "proxy/index/index_layout.h"
#include "proxy/index/instance_set.h"

namespace moesaic::proxy {

/// Mixes the bits of a key, which may be a small number, by MurmurHash3's finalizer.
inline uint64_t MixBits(uint64_t x) {
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdULL;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ULL;
  return x ^ x >> 33;
}

/// The tables of one zone, with addresses of this process.
class KeyTable {
 public:
  explicit KeyTable(const Zone& zone)
      : zone_(zone),
        index_(zone.index()),
        keys_(zone.At<KeyBucket>(index_.key_buckets)),
        hashes_(zone.At<HashBucket>(index_.hash_buckets)) {}

  IndexLayout& index() const { return index_; }
  uint64_t FirstBucket(uint64_t mixed) const { return (mixed & 0xffffffffU) * index_.num_key_buckets >> 32; }
  uint64_t SecondBucket(uint64_t mixed) const { return (mixed >> 32) * index_.num_key_buckets >> 32; }
  /// Prefetches both buckets of a key. For four keys in ten, the second bucket is read.
  void Prefetch(uint64_t key) const {
    const uint64_t mixed = MixBits(key);
    __builtin_prefetch(&keys_[FirstBucket(mixed)]);
    __builtin_prefetch(&keys_[SecondBucket(mixed)]);
  }
  /// Number by which blocks name an instance now.
  int NumberOf(int instance) const {
    return index_.numbers.number_of[static_cast<size_t>(instance)].load(std::memory_order_acquire);
  }
  /// Instance of a number; -1: the number is free, or its blocks wait for their removal.
  int OwnerOf(int number) const {
    return index_.numbers.owner_of[static_cast<size_t>(number)].load(std::memory_order_acquire) - 1;
  }
  /// Prefetches the words of a bit set that contain the number.
  void PrefetchSet(uint32_t set, int number) const {
    const uint32_t used = tiers_used();
    for (uint32_t t = 0; t < kNumTiers; ++t) {
      if ((used & 1U << t) != 0) __builtin_prefetch(&Planes(set)[t * tier_stride() + number / 64]);
    }
  }
  /// Prefetches the whole bit set.
  void PrefetchSet(uint32_t set) const {
    for (uint32_t w = 0; w < index_.set_words; w += 8) PrefetchSet(set, static_cast<int>(w * 64));
  }

  /// Returns the word of a key; empty if it is not in the table. Called by readers.
  SetWord Load(uint64_t key) const {
    const KeyBucket::Entry* const entry = Find(key);
    return SetWord(entry == nullptr ? 0 : entry->set.load(std::memory_order_acquire));
  }
  KeyBucket::Entry* Find(uint64_t key) const {
    const uint64_t mixed = MixBits(key);
    for (KeyBucket::Entry& entry : keys_[FirstBucket(mixed)].entries) {
      if (entry.key.load(std::memory_order_acquire) == key) return &entry;
    }
    for (KeyBucket::Entry& entry : keys_[SecondBucket(mixed)].entries) {
      if (entry.key.load(std::memory_order_acquire) == key) return &entry;
    }
    return nullptr;
  }
  int num_instances() const { return static_cast<int>(zone_.options().max_instances); }
  KeyBucket& bucket(uint64_t i) const { return keys_[i]; }

  /// Words of the first tier of a set; those of tier t follow at t * tier_stride().
  std::atomic<uint64_t>* Planes(uint32_t set) const {
    return zone_.At<std::atomic<uint64_t>>(index_.sets) + uint64_t{set} * index_.set_words;
  }
  uint64_t tier_stride() const { return uint64_t{index_.num_sets} * index_.set_words; }
  uint32_t tiers_used() const { return index_.tiers_used.load(std::memory_order_relaxed); }
  /// Takes a set with all bits clear.
  std::optional<uint32_t> TakeSet() const;
  void FreeSet(uint32_t set) const;

  HashBucket& FirstHashBucket(uint64_t mixed) const {
    return hashes_[(mixed & 0xffffffffU) * index_.num_hash_buckets >> 32];
  }
  HashBucket& SecondHashBucket(uint64_t mixed) const {
    return hashes_[(mixed >> 32) * index_.num_hash_buckets >> 32];
  }
  HashBucket& hash_bucket(uint64_t i) const { return hashes_[i]; }
  Expected& expected(uint64_t i) const {
    return zone_.At<Expected>(index_.expected)[i & (index_.expected_capacity - 1)];
  }

 private:
  const Zone& zone_;
  IndexLayout& index_;
  KeyBucket* keys_;
  HashBucket* hashes_;
};

/// Excludes other changes of the same key. A writer that dies leaves at worst a key without instances, which
/// the next change of the key or a Sweep removes.
class StripeLock {
 public:
  StripeLock(const IndexLayout& index, uint64_t key)
      : lock_(const_cast<RobustLock&>(index.stripes[MixBits(key) % kStripes])) {
    lock_.Lock();
  }
  ~StripeLock() { lock_.Unlock(); }
  StripeLock(const StripeLock&) = delete;
  StripeLock& operator=(const StripeLock&) = delete;

 private:
  RobustLock& lock_;
};

}  // namespace moesaic::proxy
