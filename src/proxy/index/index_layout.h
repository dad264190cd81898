// Layout of the prefix index in shared memory. Only the library's own files include this header.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

#include "proxy/state/records.h"
#include "proxy/state/robust_lock.h"
#include "proxy/state/zone.h"

namespace moesaic::proxy {

/// A cache line of four entries: key and set. Every key has two buckets where it may be; a deleted entry is
/// simply free again, so that there are no tombstones.
struct alignas(64) KeyBucket {
  struct Entry {
    std::atomic<uint64_t> key;  // 0: free
    std::atomic<uint64_t> set;
  };
  std::array<Entry, 4> entries;
};

/// Engine hash, mixed with the instance, to key.
struct alignas(64) HashBucket {
  struct Entry {
    std::atomic<uint64_t> hash;  // 0: free
    std::atomic<uint64_t> key;
  };
  std::array<Entry, 4> entries;
};

/// An expected block.
struct Expected {
  uint64_t key;
  Nanos deadline;
  int32_t number;  // of the instance when the block was sent there
};

/// The numbers by which blocks name instances. Clear gives an instance a fresh number, so that nothing finds
/// its blocks any more; passes over the tables remove the blocks of old numbers, a slice at a time. Changes
/// hold the lock of the expectations, except that a writer sets the bit of its number in `used`. `number_of`
/// is authoritative; `owner_of` is its inverse, which readers use.
struct InstanceNumbers {
  std::array<std::atomic<uint16_t>, kMaxNumbers> number_of;
  std::array<std::atomic<uint16_t>, kMaxNumbers> owner_of;    // instance + 1; 0: none
  std::array<std::atomic<uint64_t>, kMaxNumbers / 64> used;   // bit: blocks may have the number
  std::array<std::atomic<uint64_t>, kMaxNumbers / 64> dirty;  // bit: a pass must remove its blocks
  std::array<std::atomic<uint64_t>, kMaxNumbers / 64> pass;   // bit: the present pass removes them
  std::atomic<uint64_t> next_bucket;  // of the pass: first the buckets of keys, then those of hashes
  uint32_t count;                     // numbers that exist
};

inline constexpr uint32_t kStripes = 1024;

struct IndexLayout {
  std::array<RobustLock, kStripes> stripes;  // stripe of a key: all changes of one key exclude each other
  RobustLock writers;                        // held while a batch of events is applied
  InstanceNumbers numbers;
  uint64_t key_buckets, hash_buckets;          // offsets
  uint64_t num_key_buckets, num_hash_buckets;  // below 2^32
  // Bit sets: [kNumTiers][num_sets][set_words]. Planes of tiers that no instance uses are never touched. Set
  // i is free when it is in the list of free sets.
  uint64_t sets, set_next;
  uint32_t num_sets, set_words;
  std::atomic<uint64_t> free_set;    // number + 1 in the lower half, a counter against ABA in the upper half
  std::atomic<uint32_t> set_tag;     // counts uses of sets, so that readers notice a reused one
  std::atomic<uint32_t> tiers_used;  // bit per tier that any instance ever used
  RobustLock expectations;           // excludes changes of the ring and of the numbers by several processes
  uint64_t expected;                 // ring of Expected
  uint64_t expected_capacity;        // a power of two
  std::atomic<uint64_t> expected_head, expected_tail;
  std::atomic<uint64_t> blocks, memberships, engine_blocks, sets_used, dropped;
};

/// Bytes after the layout itself; sets the offsets when `layout` is given.
uint64_t PlaceIndex(const ZoneOptions& options, uint64_t offset, IndexLayout* layout);
void FormatIndex(const Zone& zone);

}  // namespace moesaic::proxy
