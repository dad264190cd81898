// Changes of the index. match.cc reads it.
#include "proxy/index/block_index.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "proxy/index/key_table.h"

namespace moesaic::proxy {
namespace {

constexpr uint32_t kConfirmedTiers = TierBit(Tier::kDevice) | TierBit(Tier::kHost) | TierBit(Tier::kDisk);
// A bit set with no more instances than this becomes an inline word again: less than an inline word holds, so
// that an instance that comes and leaves does not convert it each time.
constexpr int kInlineAgain = 2;

// Tiers of an instance in a bit set.
uint32_t TiersInSet(const KeyTable& table, uint32_t set, int instance) {
  const std::atomic<uint64_t>* const planes = table.Planes(set);
  const uint64_t stride = table.tier_stride();
  const uint32_t used = table.tiers_used();
  uint32_t tiers = 0;
  for (int t = 0; t < kNumTiers; ++t) {
    if ((used & 1U << t) == 0)
      continue;  // its plane was never written, and takes no memory while nothing reads it
    if ((planes[t * stride + instance / 64].load(std::memory_order_relaxed) >> (instance % 64) & 1) != 0)
      tiers |= 1U << t;
  }
  return tiers;
}

void AssignInSet(const KeyTable& table, uint32_t set, int instance, uint32_t tiers) {
  std::atomic<uint64_t>* const planes = table.Planes(set);
  const uint64_t stride = table.tier_stride();
  const uint64_t bit = uint64_t{1} << (instance % 64);
  const uint32_t used = table.tiers_used() | tiers;
  for (int t = 0; t < kNumTiers; ++t) {
    if ((used & 1U << t) == 0) continue;
    std::atomic<uint64_t>& word = planes[t * stride + instance / 64];
    const uint64_t old = word.load(std::memory_order_relaxed);
    const uint64_t changed = (tiers & 1U << t) != 0 ? old | bit : old & ~bit;
    if (changed != old) word.store(changed, std::memory_order_release);
  }
}

// The set as an inline word, if it has at most `most` instances.
std::optional<SetWord> InlineOf(const KeyTable& table, uint32_t set, int most) {
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
      const int instance = static_cast<int>(w) * 64 + std::countr_zero(any);
      word.Assign(instance, TiersInSet(table, set, instance));
    }
  }
  return word;
}

// Counts the entries of a bucket whose `word` is 0: they are free.
template <typename Bucket, typename Entry>
int FreeEntries(const Bucket& bucket, std::atomic<uint64_t> Entry::*word) {
  int free = 0;
  for (const Entry& entry : bucket.entries) free += (entry.*word).load(std::memory_order_relaxed) == 0;
  return free;
}

// Sets the `word` of the first free entry of the buckets. Null: there is none.
template <typename Bucket, typename Entry>
Entry* TakeFreeEntry(Bucket* first, Bucket* second, std::atomic<uint64_t> Entry::*word, uint64_t value) {
  for (Bucket* const bucket : {first, second}) {
    for (Entry& entry : bucket->entries) {
      uint64_t none = 0;
      if ((entry.*word).load(std::memory_order_relaxed) == 0 &&
          (entry.*word).compare_exchange_strong(none, value, std::memory_order_acq_rel)) {
        return &entry;
      }
    }
  }
  return nullptr;
}

// Takes a free entry for a key that is in neither of its buckets: in the first bucket while that is at most
// half full, since readers look there first; then in the emptier one.
KeyBucket::Entry* Claim(const KeyTable& table, uint64_t key) {
  const uint64_t mixed = MixBits(key);
  KeyBucket *first = &table.bucket(table.FirstBucket(mixed)),
            *second = &table.bucket(table.SecondBucket(mixed));
  const int free = FreeEntries(*first, &KeyBucket::Entry::key);
  if (free < 2 && FreeEntries(*second, &KeyBucket::Entry::key) > free) std::swap(first, second);
  return TakeFreeEntry(first, second, &KeyBucket::Entry::key, key);
}

uint64_t Confirmed(uint32_t tiers) { return static_cast<uint64_t>(std::popcount(tiers & kConfirmedTiers)); }

// Changes of the counters by one call. They are added at its end, as the counters are one cache line for all
// writers. A process that dies before leaves statistics that are too low or too high by one call.
struct Changes {
  uint64_t blocks = 0, memberships = 0, dropped = 0;  // modulo 2^64

  void Count(uint32_t before, uint32_t after) { memberships += Confirmed(after) - Confirmed(before); }
  void AddTo(IndexLayout& index) const {
    if (blocks != 0) index.blocks.fetch_add(blocks, std::memory_order_relaxed);
    if (memberships != 0) index.memberships.fetch_add(memberships, std::memory_order_relaxed);
    if (dropped != 0) index.dropped.fetch_add(dropped, std::memory_order_relaxed);
  }
};

// Replaces the tiers of an instance in the entry's set by `change(tiers)`. The caller holds the stripe. False
// when a bit set is needed and none is free. Frees the entry when its set becomes empty.
template <typename Change>
bool Update(const KeyTable& table, KeyBucket::Entry& entry, int instance, Changes& changes, Change change) {
  SetWord word(entry.set.load(std::memory_order_relaxed));
  uint32_t before = 0, after = 0;
  if (word.is_set()) {
    before = TiersInSet(table, word.set_number(), instance);
    after = change(before);
    if (after == before) return true;
    AssignInSet(table, word.set_number(), instance, after);
    changes.Count(before, after);
    if (after != 0) return true;
    if (const auto small = InlineOf(table, word.set_number(), kInlineAgain)) {
      entry.set.store(small->word(), std::memory_order_release);
      table.FreeSet(word.set_number());
      word = *small;
    } else {
      return true;
    }
  } else {
    before = word.TiersFor(instance);
    after = change(before);
    SetWord changed = word;
    if (changed.Assign(instance, after)) {
      if (changed.word() != word.word()) entry.set.store(changed.word(), std::memory_order_release);
      word = changed;
    } else {
      const auto set = table.TakeSet();
      if (!set) return false;
      for (int i = 0; i < SetWord::kInline; ++i)
        AssignInSet(table, *set, SetWord::InstanceOf(word.field(i)), SetWord::TiersOf(word.field(i)));
      AssignInSet(table, *set, instance, after);
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

uint64_t NonZero(uint64_t key) { return key == 0 ? 1 : key; }

// A change reads the line of the key, then that of its bit set. Both are loaded ahead: a line from memory
// takes about 100 ns, a change with all its lines in the cache about 40 ns.
constexpr size_t kLineAhead = 16, kSetAhead = 8;

// Calls fn(key) for all keys, with the memory of later ones prefetched.
template <typename Fn>
void ForEachKey(const KeyTable& table, int instance, std::span<const uint64_t> keys, Fn fn) {
  for (size_t i = 0; i < std::min(kLineAhead, keys.size()); ++i) table.Prefetch(NonZero(keys[i]));
  for (size_t i = 0; i < keys.size(); ++i) {
    if (i + kLineAhead < keys.size()) table.Prefetch(NonZero(keys[i + kLineAhead]));
    if (i + kSetAhead < keys.size()) {
      const SetWord word = table.Load(NonZero(keys[i + kSetAhead]));
      if (word.is_set()) table.PrefetchSet(word.set_number(), instance);
    }
    fn(NonZero(keys[i]));
  }
}

// Engine hashes carry their instance in the low bits, so that Clear finds them.
uint64_t HashWord(int instance, uint64_t engine_hash) {
  const uint64_t mixed = MixBits(engine_hash ^ MixBits(static_cast<uint64_t>(instance) + 1));
  return (mixed & ~uint64_t{0x7ff}) | uint64_t{1} << 11 | static_cast<uint64_t>(instance);
}

HashBucket::Entry* FindHash(const KeyTable& table, uint64_t word) {
  const uint64_t mixed = MixBits(word);
  for (HashBucket* const bucket : {&table.FirstHashBucket(mixed), &table.SecondHashBucket(mixed)}) {
    for (HashBucket::Entry& entry : bucket->entries) {
      if (entry.hash.load(std::memory_order_acquire) == word) return &entry;
    }
  }
  return nullptr;
}

// Takes a free entry for a hash that is in neither of its buckets, in the emptier one.
HashBucket::Entry* ClaimHash(const KeyTable& table, uint64_t word) {
  const uint64_t mixed = MixBits(word);
  HashBucket *first = &table.FirstHashBucket(mixed), *second = &table.SecondHashBucket(mixed);
  constexpr auto kHash = &HashBucket::Entry::hash;
  if (FreeEntries(*second, kHash) > FreeEntries(*first, kHash)) std::swap(first, second);
  return TakeFreeEntry(first, second, kHash, word);
}

// Protects the ring of expectations. It needs no repair when its owner was killed: an entry is written before
// its mark and removed after it, so that each state between two stores is valid.
class ExpectationsLock {
 public:
  explicit ExpectationsLock(IndexLayout& index) : lock_(index.expectations) { lock_.Lock(); }
  ~ExpectationsLock() { lock_.Unlock(); }
  ExpectationsLock(const ExpectationsLock&) = delete;
  ExpectationsLock& operator=(const ExpectationsLock&) = delete;

 private:
  RobustLock& lock_;
};

}  // namespace

size_t BlockIndex::Add(int instance, Tier tier, std::span<const uint64_t> keys) {
  const KeyTable table(zone_);
  IndexLayout& index = table.index();
  const uint32_t bit = TierBit(tier);
  if ((index.tiers_used.load(std::memory_order_relaxed) & bit) == 0)
    index.tiers_used.fetch_or(bit, std::memory_order_relaxed);
  Changes changes;
  ForEachKey(table, instance, keys, [&](uint64_t key) {
    const StripeLock lock(index, key);
    KeyBucket::Entry* entry = table.Find(key);
    if (entry == nullptr) {
      entry = Claim(table, key);
      if (entry == nullptr) {
        ++changes.dropped;
        return;
      }
      ++changes.blocks;
    }
    // A block in device memory is not expected there any more.
    const bool added = Update(table, *entry, instance, changes, [&](uint32_t tiers) {
      if (tier == Tier::kSpeculative) return (tiers & TierBit(Tier::kDevice)) != 0 ? tiers : tiers | bit;
      if (tier == Tier::kDevice) tiers &= ~TierBit(Tier::kSpeculative);
      return tiers | bit;
    });
    changes.dropped += !added;
  });
  changes.AddTo(index);
  return keys.size() - changes.dropped;
}

void BlockIndex::Remove(int instance, Tier tier, std::span<const uint64_t> keys) {
  const KeyTable table(zone_);
  Changes changes;
  ForEachKey(table, instance, keys, [&](uint64_t key) {
    const StripeLock lock(table.index(), key);
    KeyBucket::Entry* const entry = table.Find(key);
    if (entry == nullptr) return;
    Update(table, *entry, instance, changes, [&](uint32_t tiers) { return tiers & ~TierBit(tier); });
  });
  changes.AddTo(table.index());
}

uint32_t BlockIndex::Tiers(int instance, uint64_t key) const {
  key = NonZero(key);
  const KeyTable table(zone_);
  const StripeLock lock(table.index(), key);
  const SetWord word = table.Load(key);
  return word.is_set() ? TiersInSet(table, word.set_number(), instance) : word.TiersFor(instance);
}

void BlockIndex::Clear(int instance) {
  const KeyTable table(zone_);
  IndexLayout& index = table.index();
  Changes changes;
  for (uint64_t b = 0; b < index.num_key_buckets; ++b) {
    for (KeyBucket::Entry& entry : table.bucket(b).entries) {
      const uint64_t key = entry.key.load(std::memory_order_acquire);
      if (key == 0) continue;
      // Only this writer adds blocks of the instance, so that most entries need no lock.
      const SetWord word(entry.set.load(std::memory_order_acquire));
      if (!word.is_set() && word.TiersFor(instance) == 0) continue;
      const StripeLock lock(index, key);
      if (entry.key.load(std::memory_order_relaxed) != key) continue;
      Update(table, entry, instance, changes, [](uint32_t) { return 0U; });
    }
  }
  changes.AddTo(index);
  for (uint64_t b = 0; b < index.num_hash_buckets; ++b) {
    for (HashBucket::Entry& entry : table.hash_bucket(b).entries) {
      const uint64_t word = entry.hash.load(std::memory_order_acquire);
      if (word == 0 || static_cast<int>(word & 0x7ff) != instance) continue;
      entry.hash.store(0, std::memory_order_release);
      index.engine_blocks.fetch_sub(1, std::memory_order_relaxed);
    }
  }
}

size_t BlockIndex::MapEngineHashes(int instance, std::span<const uint64_t> engine_hashes,
                                   std::span<const uint64_t> keys) {
  const KeyTable table(zone_);
  uint64_t added = 0;
  size_t i = 0;
  for (; i < engine_hashes.size(); ++i) {
    if (i + kLineAhead < engine_hashes.size()) PrefetchEngineHash(instance, engine_hashes[i + kLineAhead]);
    const uint64_t word = HashWord(instance, engine_hashes[i]);
    if (HashBucket::Entry* const entry = FindHash(table, word)) {
      entry->key.store(keys[i], std::memory_order_release);
      continue;
    }
    HashBucket::Entry* const entry = ClaimHash(table, word);
    if (entry == nullptr) {
      table.index().dropped.fetch_add(1, std::memory_order_relaxed);
      break;
    }
    entry->key.store(keys[i], std::memory_order_release);
    ++added;
  }
  table.index().engine_blocks.fetch_add(added, std::memory_order_relaxed);
  return i;
}

void BlockIndex::PrefetchEngineHash(int instance, uint64_t engine_hash) const {
  const KeyTable table(zone_);
  const uint64_t mixed = MixBits(HashWord(instance, engine_hash));
  __builtin_prefetch(&table.FirstHashBucket(mixed));
  __builtin_prefetch(&table.SecondHashBucket(mixed));
}

std::optional<uint64_t> BlockIndex::FindEngineHash(int instance, uint64_t engine_hash) const {
  const KeyTable table(zone_);
  const HashBucket::Entry* const entry = FindHash(table, HashWord(instance, engine_hash));
  if (entry == nullptr) return std::nullopt;
  return entry->key.load(std::memory_order_acquire);
}

std::optional<uint64_t> BlockIndex::UnmapEngineHash(int instance, uint64_t engine_hash) {
  const KeyTable table(zone_);
  HashBucket::Entry* const entry = FindHash(table, HashWord(instance, engine_hash));
  if (entry == nullptr) return std::nullopt;
  const uint64_t key = entry->key.load(std::memory_order_acquire);
  entry->hash.store(0, std::memory_order_release);
  table.index().engine_blocks.fetch_sub(1, std::memory_order_relaxed);
  return key;
}

// The ring names every block that is marked as expected, at any moment: marks follow their entries and are
// removed before them. So a process that dies in between, or a master that lost its lease, leaves no mark
// that never expires.
void BlockIndex::AddSpeculative(int instance, std::span<const uint64_t> keys, Nanos deadline) {
  const KeyTable table(zone_);
  IndexLayout& index = table.index();
  keys = keys.first(std::min<size_t>(keys.size(), index.expected_capacity));
  const ExpectationsLock lock(index);
  uint64_t tail = index.expected_tail.load(std::memory_order_relaxed);
  const uint64_t used = tail - index.expected_head.load(std::memory_order_relaxed);
  if (used + keys.size() > index.expected_capacity) {  // the oldest expectations end early
    DropExpected(table, std::numeric_limits<Nanos>::max(), used + keys.size() - index.expected_capacity);
  }
  // The end of the prompt expires before its beginning.
  for (size_t i = keys.size(); i-- > 0;)
    table.expected(tail++) = {.key = keys[i], .deadline = deadline, .instance = instance};
  index.expected_tail.store(tail, std::memory_order_release);
  Add(instance, Tier::kSpeculative, keys);
}

void BlockIndex::Expire(Nanos now, size_t limit) {
  const KeyTable table(zone_);
  const ExpectationsLock lock(table.index());
  DropExpected(table, now, limit);
}

void BlockIndex::DropExpected(const KeyTable& table, Nanos now, size_t limit) {
  IndexLayout& index = table.index();
  uint64_t head = index.expected_head.load(std::memory_order_relaxed);
  const uint64_t tail = index.expected_tail.load(std::memory_order_relaxed);
  std::vector<uint64_t> keys;  // of one instance
  while (head != tail && limit > 0) {
    const int instance = table.expected(head).instance;
    keys.clear();
    for (; head != tail && limit > 0; ++head, --limit) {
      const Expected& oldest = table.expected(head);
      if (oldest.deadline > now || oldest.instance != instance) break;
      keys.push_back(oldest.key);
    }
    if (keys.empty()) break;
    Remove(instance, Tier::kSpeculative, keys);
    index.expected_head.store(head, std::memory_order_release);
  }
}

Nanos BlockIndex::NextExpiry() const {
  const KeyTable table(zone_);
  IndexLayout& index = table.index();
  const ExpectationsLock lock(index);
  const uint64_t head = index.expected_head.load(std::memory_order_relaxed);
  return head == index.expected_tail.load(std::memory_order_relaxed) ? 0 : table.expected(head).deadline;
}

IndexStats BlockIndex::Stats() const {
  const IndexLayout& index = zone_.index();
  const auto read = [](const std::atomic<uint64_t>& value) { return value.load(std::memory_order_relaxed); };
  IndexStats stats;
  stats.blocks = read(index.blocks);
  stats.memberships = read(index.memberships);
  stats.engine_blocks = read(index.engine_blocks);
  stats.shared_blocks = read(index.sets_used);
  stats.speculative = read(index.expected_tail) - read(index.expected_head);
  stats.dropped = read(index.dropped);
  stats.bytes = index.expected + index.expected_capacity * sizeof(Expected) - index.key_buckets;
  return stats;
}

}  // namespace moesaic::proxy
