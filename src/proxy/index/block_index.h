// BlockIndex: maps each block to the instances that hold it, in one table in shared memory.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "proxy/state/records.h"
#include "proxy/state/zone.h"

namespace moesaic::proxy {

class KeyTable;

/// Memory in which an instance holds a block. kSpeculative: the block was sent there and is expected to
/// appear.
enum class Tier : uint8_t { kDevice, kHost, kDisk, kSpeculative };
inline constexpr int kNumTiers = 4;

/// Length of the known prefix of a prompt on one instance.
struct InstanceMatch {
  int instance = -1;
  uint32_t blocks = 0;         ///< leading blocks in any tier
  uint32_t device_blocks = 0;  ///< leading blocks in device memory or expected there
};

/// Result of Match. A reused object keeps its memory.
struct MatchResult {
  std::vector<InstanceMatch> matches;  ///< instances with at least one block; longest first
  uint32_t longest = 0;
  std::vector<uint32_t> scratch;  ///< of Match
  uint32_t BlocksOf(int instance) const;
  uint32_t DeviceBlocksOf(int instance) const;
};

struct IndexStats {
  uint64_t blocks = 0;         ///< distinct keys
  uint64_t memberships = 0;    ///< (block, instance, tier) without speculative ones
  uint64_t engine_blocks = 0;  ///< engine hashes
  uint64_t shared_blocks = 0;  ///< keys whose instances need a bit set
  uint64_t speculative = 0;
  uint64_t dropped = 0;   ///< insertions that found no room; each shortens a later match
  uint64_t clearing = 0;  ///< cleared instances whose blocks were not removed yet
  uint64_t bytes = 0;     ///< memory of the tables
};

/// One writer per instance: Add, Remove and Clear of an instance, and changes of its engine hashes, come from
/// one process at a time. Writers of different instances run in parallel. Readers take no lock.
///
/// A table entry is a key and a word that holds up to four instances, or the number of a bit set. Match
/// answers for all instances at once: it keeps the set of instances that hold every block so far.
///
/// Engines evict the end of a sequence before its beginning, so the instances that hold a block hold its
/// parents. Match uses this: it probes every kJump-th key, and searches between two probes only when an
/// instance is lost there. An instance that lost a single block between two probes is reported as if it had
/// the block; the engine computes it again.
class BlockIndex {
 public:
  /// Distance of the keys that Match probes.
  static constexpr size_t kJump = 64;

  explicit BlockIndex(Zone zone) : zone_(zone) {}

  /// Finds the longest prefix of `keys` on each instance.
  void Match(std::span<const uint64_t> keys, MatchResult& result) const;

  /// Records that the instance holds the blocks. Returns the number of blocks for which the table had room. A
  /// call with many keys is faster, because it prefetches the memory of later ones.
  size_t Add(int instance, Tier tier, std::span<const uint64_t> keys);
  bool Add(int instance, Tier tier, uint64_t key) { return Add(instance, tier, {&key, 1}) == 1; }
  void Remove(int instance, Tier tier, std::span<const uint64_t> keys);
  void Remove(int instance, Tier tier, uint64_t key) { Remove(instance, tier, {&key, 1}); }
  /// Returns the tiers in which the instance has the block: bit i for tier i.
  uint32_t Tiers(int instance, uint64_t key) const;
  /// Hides all blocks of the instance: no match and no other call finds them any more. Takes a short time;
  /// Sweep removes them. If SpareNumbers() is 0, the call removes all hidden blocks itself.
  void Clear(int instance);
  /// Removes blocks of cleared instances in the next `buckets` buckets of the tables. Any process may call
  /// it. Returns false when none are left.
  bool Sweep(size_t buckets);
  /// Returns whether Sweep has blocks to remove. Takes no lock.
  bool SweepWanted() const;
  /// Returns how many instances can be cleared before Sweep has ended its pass. Takes no lock.
  int SpareNumbers() const;

  /// Links an engine's own hashes to keys, so that later events can name them. Stops at the first one for
  /// which the table has no room; returns the number of links.
  size_t MapEngineHashes(int instance, std::span<const uint64_t> engine_hashes,
                         std::span<const uint64_t> keys);
  bool MapEngineHash(int instance, uint64_t engine_hash, uint64_t key) {
    return MapEngineHashes(instance, {&engine_hash, 1}, {&key, 1}) == 1;
  }
  /// Loads the memory that FindEngineHash and UnmapEngineHash of this hash read.
  void PrefetchEngineHash(int instance, uint64_t engine_hash) const;
  /// Returns the key of an engine's hash.
  std::optional<uint64_t> FindEngineHash(int instance, uint64_t engine_hash) const;
  std::optional<uint64_t> UnmapEngineHash(int instance, uint64_t engine_hash);

  /// Records that the blocks are expected on the instance until `deadline`, because a request with them was
  /// sent there. Any process may call this and Expire. Deadlines should not decrease.
  void AddSpeculative(int instance, std::span<const uint64_t> keys, Nanos deadline);
  /// Drops expectations whose deadline has passed; at most `limit` entries a call.
  void Expire(Nanos now, size_t limit = 4096);
  /// Returns the deadline of the oldest expectation, at which Expire is due; 0: there is none.
  Nanos NextExpiry() const;

  IndexStats Stats() const;

 private:
  void DropExpected(const KeyTable& table, Nanos now, size_t limit);

  Zone zone_;
};

}  // namespace moesaic::proxy
