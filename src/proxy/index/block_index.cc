// Changes of the index. match.cc reads it.
#include "proxy/index/block_index.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "proxy/index/entry_update.h"
#include "proxy/index/instance_numbers.h"
#include "proxy/index/key_table.h"

namespace moesaic::proxy {
namespace {

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

uint64_t NonZero(uint64_t key) { return key == 0 ? 1 : key; }

// A change reads the line of the key, then that of its bit set. Both are loaded ahead: a line from memory
// takes about 100 ns, a change with all its lines in the cache about 40 ns.
constexpr size_t kLineAhead = 16, kSetAhead = 8;

// Calls fn(key) for all keys, with the memory of later ones prefetched.
template <typename Fn>
void ForEachKey(const KeyTable& table, int number, std::span<const uint64_t> keys, Fn fn) {
  for (size_t i = 0; i < std::min(kLineAhead, keys.size()); ++i) table.Prefetch(NonZero(keys[i]));
  for (size_t i = 0; i < keys.size(); ++i) {
    if (i + kLineAhead < keys.size()) table.Prefetch(NonZero(keys[i + kLineAhead]));
    if (i + kSetAhead < keys.size()) {
      const SetWord word = table.Load(NonZero(keys[i + kSetAhead]));
      if (word.is_set()) table.PrefetchSet(word.set_number(), number);
    }
    fn(NonZero(keys[i]));
  }
}

// Engine hashes carry the number of their instance in the low bits, so that Sweep finds them.
uint64_t HashWord(int number, uint64_t engine_hash) {
  const uint64_t mixed = MixBits(engine_hash ^ MixBits(static_cast<uint64_t>(number) + 1));
  return (mixed & ~uint64_t{kMaxNumbers - 1}) | uint64_t{kMaxNumbers} | static_cast<uint64_t>(number);
}
int NumberOfHash(uint64_t word) { return static_cast<int>(word % kMaxNumbers); }

void PrefetchHash(const KeyTable& table, uint64_t word) {
  const uint64_t mixed = MixBits(word);
  __builtin_prefetch(&table.FirstHashBucket(mixed));
  __builtin_prefetch(&table.SecondHashBucket(mixed));
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

// Returns a number of the word that is in `bits`, or -1.
int NumberAmong(const KeyTable& table, SetWord word, const NumberBits& bits) {
  if (!word.is_set()) {
    for (int i = 0; i < SetWord::kInline; ++i) {
      const int number = SetWord::NumberOf(word.field(i));
      if (SetWord::TiersOf(word.field(i)) != 0 && HasNumber(bits, number)) return number;
    }
    return -1;
  }
  const std::atomic<uint64_t>* const planes = table.Planes(word.set_number());
  const uint32_t used = table.tiers_used();
  for (uint32_t w = 0; w < table.index().set_words; ++w) {
    const uint64_t wanted = bits[w].load(std::memory_order_relaxed);  // of few instances
    if (wanted == 0) continue;
    for (int t = 0; t < kNumTiers; ++t) {
      if ((used & 1U << t) == 0) continue;
      const uint64_t among = planes[t * table.tier_stride() + w].load(std::memory_order_relaxed) & wanted;
      if (among != 0) return static_cast<int>(w) * 64 + std::countr_zero(among);
    }
  }
  return -1;
}

// Removes the numbers in `bits` from an entry. Frees an entry that a writer left without a set when it was
// killed. Returns whether anything changed.
bool SweepEntry(const KeyTable& table, KeyBucket::Entry& entry, const NumberBits& bits, Changes& changes) {
  const uint64_t key = entry.key.load(std::memory_order_acquire);
  if (key == 0) return false;
  // No writer adds these numbers, so that most entries need no lock.
  const SetWord word(entry.set.load(std::memory_order_acquire));
  if (!word.empty() && NumberAmong(table, word, bits) < 0) {
    // A bit set may have been freed and reused while it was read; the entry has another word then.
    std::atomic_thread_fence(std::memory_order_acquire);
    if (entry.set.load(std::memory_order_relaxed) == word.word()) return false;
  }
  const StripeLock lock(table.index(), key);
  bool changed = false;
  while (entry.key.load(std::memory_order_relaxed) == key) {
    const SetWord present(entry.set.load(std::memory_order_relaxed));
    const int number = NumberAmong(table, present, bits);
    if (number < 0 && !present.empty()) break;
    Update(table, entry, std::max(number, 0), changes, [](uint32_t) { return 0U; });
    changed = true;
  }
  return changed;
}

// Removes the engine hashes of the numbers in `bits`. Returns their count.
uint64_t SweepHashes(HashBucket& bucket, const NumberBits& bits) {
  uint64_t removed = 0;
  for (HashBucket::Entry& entry : bucket.entries) {
    uint64_t word = entry.hash.load(std::memory_order_acquire);
    if (word == 0 || !HasNumber(bits, NumberOfHash(word))) continue;
    // Another process may have removed it, and a writer may have taken the entry.
    if (entry.hash.compare_exchange_strong(word, 0, std::memory_order_acq_rel)) ++removed;
  }
  return removed;
}

// Continues the pass over the tables, or begins one, by at most `limit` buckets. Returns whether blocks of
// cleared instances are left. The caller holds the lock of the numbers.
bool SweepSlice(const KeyTable& table, uint64_t limit) {
  IndexLayout& index = table.index();
  InstanceNumbers& numbers = index.numbers;
  if (!AnyNumber(numbers.pass)) {
    if (!AnyNumber(numbers.dirty)) return false;
    numbers.next_bucket.store(0, std::memory_order_relaxed);
    for (size_t w = 0; w < numbers.pass.size(); ++w)
      numbers.pass[w].store(numbers.dirty[w].load(std::memory_order_relaxed), std::memory_order_release);
  }
  const uint64_t total = index.num_key_buckets + index.num_hash_buckets;
  uint64_t next = numbers.next_bucket.load(std::memory_order_relaxed);
  Changes changes;
  uint64_t hashes = 0;
  for (const uint64_t end = next + std::min(limit, total - next); next < end; ++next) {
    if (next < index.num_key_buckets) {
      for (KeyBucket::Entry& entry : table.bucket(next).entries)
        SweepEntry(table, entry, numbers.pass, changes);
    } else {
      hashes += SweepHashes(table.hash_bucket(next - index.num_key_buckets), numbers.pass);
    }
  }
  changes.AddTo(index);
  index.engine_blocks.fetch_sub(hashes, std::memory_order_relaxed);
  numbers.next_bucket.store(next, std::memory_order_relaxed);
  if (next < total) return true;
  for (size_t w = 0; w < numbers.pass.size(); ++w) {  // in this order: the process may be killed in between
    const uint64_t done = numbers.pass[w].load(std::memory_order_relaxed);
    numbers.used[w].fetch_and(~done, std::memory_order_release);
    numbers.pass[w].store(0, std::memory_order_release);
    numbers.dirty[w].fetch_and(~done, std::memory_order_release);
  }
  return AnyNumber(numbers.dirty);
}

// Frees entries of cleared instances in the buckets of a key. False: there are none.
bool MakeRoom(const KeyTable& table, uint64_t key, Changes& changes) {
  const NumberBits& dirty = table.index().numbers.dirty;
  if (!AnyNumber(dirty)) return false;
  const uint64_t mixed = MixBits(key);
  bool freed = false;
  for (const uint64_t b : {table.FirstBucket(mixed), table.SecondBucket(mixed)}) {
    for (KeyBucket::Entry& entry : table.bucket(b).entries) freed |= SweepEntry(table, entry, dirty, changes);
  }
  return freed;
}

bool MakeHashRoom(const KeyTable& table, uint64_t word) {
  const NumberBits& dirty = table.index().numbers.dirty;
  if (!AnyNumber(dirty)) return false;
  const uint64_t mixed = MixBits(word);
  uint64_t freed = 0;
  for (HashBucket* const bucket : {&table.FirstHashBucket(mixed), &table.SecondHashBucket(mixed)})
    freed += SweepHashes(*bucket, dirty);
  table.index().engine_blocks.fetch_sub(freed, std::memory_order_relaxed);
  return freed > 0;
}

void MarkUsed(const KeyTable& table, int number) {
  NumberBits& used = table.index().numbers.used;
  if (!HasNumber(used, number)) AddNumber(used, number);
}

// Adds one block. False: there is no room.
bool AddKey(const KeyTable& table, int number, Tier tier, uint64_t key, Changes& changes) {
  const StripeLock lock(table.index(), key);
  KeyBucket::Entry* entry = table.Find(key);
  if (entry == nullptr) {
    entry = Claim(table, key);
    if (entry == nullptr) return false;
    ++changes.blocks;
  }
  // A block in device memory is not expected there any more.
  return Update(table, *entry, number, changes, [tier](uint32_t tiers) {
    if (tier == Tier::kSpeculative)
      return (tiers & TierBit(Tier::kDevice)) != 0 ? tiers : tiers | TierBit(tier);
    if (tier == Tier::kDevice) tiers &= ~TierBit(Tier::kSpeculative);
    return tiers | TierBit(tier);
  });
}

void RemoveKeys(const KeyTable& table, int number, Tier tier, std::span<const uint64_t> keys) {
  Changes changes;
  ForEachKey(table, number, keys, [&](uint64_t key) {
    const StripeLock lock(table.index(), key);
    KeyBucket::Entry* const entry = table.Find(key);
    if (entry == nullptr) return;
    Update(table, *entry, number, changes, [tier](uint32_t tiers) { return tiers & ~TierBit(tier); });
  });
  changes.AddTo(table.index());
}

}  // namespace

size_t BlockIndex::Add(int instance, Tier tier, std::span<const uint64_t> keys) {
  const KeyTable table(zone_);
  IndexLayout& index = table.index();
  const uint32_t bit = TierBit(tier);
  if ((index.tiers_used.load(std::memory_order_relaxed) & bit) == 0)
    index.tiers_used.fetch_or(bit, std::memory_order_relaxed);
  const int number = table.NumberOf(instance);
  MarkUsed(table, number);
  Changes changes;
  ForEachKey(table, number, keys, [&](uint64_t key) {
    if (AddKey(table, number, tier, key, changes)) return;
    if (MakeRoom(table, key, changes) && AddKey(table, number, tier, key, changes)) return;
    ++changes.dropped;
  });
  changes.AddTo(index);
  return keys.size() - changes.dropped;
}

void BlockIndex::Remove(int instance, Tier tier, std::span<const uint64_t> keys) {
  const KeyTable table(zone_);
  RemoveKeys(table, table.NumberOf(instance), tier, keys);
}

uint32_t BlockIndex::Tiers(int instance, uint64_t key) const {
  key = NonZero(key);
  const KeyTable table(zone_);
  const int number = table.NumberOf(instance);
  const StripeLock lock(table.index(), key);
  const SetWord word = table.Load(key);
  return word.is_set() ? TiersInSet(table, word.set_number(), number) : word.TiersFor(number);
}

void BlockIndex::Clear(int instance) {
  const KeyTable table(zone_);
  const ExpectationsLock lock(table);
  if (!HasNumber(table.index().numbers.used, table.NumberOf(instance))) return;
  int fresh = FreeNumber(table);
  while (fresh < 0) {  // more instances were cleared than there are spare numbers
    SweepSlice(table, std::numeric_limits<uint64_t>::max());
    fresh = FreeNumber(table);
  }
  Renumber(table, instance, fresh);
}

bool BlockIndex::Sweep(size_t limit) {
  const KeyTable table(zone_);
  const ExpectationsLock lock(table);
  return SweepSlice(table, limit);
}

bool BlockIndex::SweepWanted() const { return AnyNumber(zone_.index().numbers.dirty); }

int BlockIndex::SpareNumbers() const {
  const InstanceNumbers& numbers = zone_.index().numbers;
  const int spare = static_cast<int>(numbers.count - zone_.options().max_instances);
  return std::max(spare - CountNumbers(numbers.dirty), 0);
}

size_t BlockIndex::MapEngineHashes(int instance, std::span<const uint64_t> engine_hashes,
                                   std::span<const uint64_t> keys) {
  const KeyTable table(zone_);
  const int number = table.NumberOf(instance);
  MarkUsed(table, number);
  uint64_t added = 0;
  size_t i = 0;
  for (; i < engine_hashes.size(); ++i) {
    if (i + kLineAhead < engine_hashes.size())
      PrefetchHash(table, HashWord(number, engine_hashes[i + kLineAhead]));
    const uint64_t word = HashWord(number, engine_hashes[i]);
    if (HashBucket::Entry* const entry = FindHash(table, word)) {
      entry->key.store(keys[i], std::memory_order_release);
      continue;
    }
    HashBucket::Entry* entry = ClaimHash(table, word);
    if (entry == nullptr && MakeHashRoom(table, word)) entry = ClaimHash(table, word);
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
  PrefetchHash(table, HashWord(table.NumberOf(instance), engine_hash));
}

std::optional<uint64_t> BlockIndex::FindEngineHash(int instance, uint64_t engine_hash) const {
  const KeyTable table(zone_);
  const HashBucket::Entry* const entry = FindHash(table, HashWord(table.NumberOf(instance), engine_hash));
  if (entry == nullptr) return std::nullopt;
  return entry->key.load(std::memory_order_acquire);
}

std::optional<uint64_t> BlockIndex::UnmapEngineHash(int instance, uint64_t engine_hash) {
  const KeyTable table(zone_);
  HashBucket::Entry* const entry = FindHash(table, HashWord(table.NumberOf(instance), engine_hash));
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
  const ExpectationsLock lock(table);
  const int number = table.NumberOf(instance);  // Clear waits for the lock
  uint64_t tail = index.expected_tail.load(std::memory_order_relaxed);
  const uint64_t used = tail - index.expected_head.load(std::memory_order_relaxed);
  if (used + keys.size() > index.expected_capacity) {  // the oldest expectations end early
    DropExpected(table, std::numeric_limits<Nanos>::max(), used + keys.size() - index.expected_capacity);
  }
  // The end of the prompt expires before its beginning.
  for (size_t i = keys.size(); i-- > 0;)
    table.expected(tail++) = {.key = keys[i], .deadline = deadline, .number = number};
  index.expected_tail.store(tail, std::memory_order_release);
  Add(instance, Tier::kSpeculative, keys);
}

void BlockIndex::Expire(Nanos now, size_t limit) {
  const KeyTable table(zone_);
  const ExpectationsLock lock(table);
  DropExpected(table, now, limit);
}

void BlockIndex::DropExpected(const KeyTable& table, Nanos now, size_t limit) {
  IndexLayout& index = table.index();
  uint64_t head = index.expected_head.load(std::memory_order_relaxed);
  const uint64_t tail = index.expected_tail.load(std::memory_order_relaxed);
  std::vector<uint64_t> keys;  // of one number
  while (head != tail && limit > 0) {
    const int number = table.expected(head).number;
    keys.clear();
    for (; head != tail && limit > 0; ++head, --limit) {
      const Expected& oldest = table.expected(head);
      if (oldest.deadline > now || oldest.number != number) break;
      keys.push_back(oldest.key);
    }
    if (keys.empty()) break;
    RemoveKeys(table, number, Tier::kSpeculative, keys);
    index.expected_head.store(head, std::memory_order_release);
  }
}

Nanos BlockIndex::NextExpiry() const {
  const KeyTable table(zone_);
  IndexLayout& index = table.index();
  const ExpectationsLock lock(table);
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
  stats.clearing = static_cast<uint64_t>(CountNumbers(index.numbers.dirty));
  stats.bytes = index.expected + index.expected_capacity * sizeof(Expected) - index.key_buckets;
  return stats;
}

}  // namespace moesaic::proxy
