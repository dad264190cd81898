// What stands on disk, by what is in it: the blocks' names in RAM, and the slots that they are in.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <array>
#include <compare>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cache/block_hash.h"
#include "cache/kv_segment.h"

namespace moesaic::cache {

/// A place for one block in a file.
struct SlotPlace {
  uint64_t segment = 0;  // its number
  int slot = 0;
  auto operator<=>(const SlotPlace&) const = default;
};

/// A block that stands on disk, or is being written there.
struct DiskBlock {
  uint64_t id = 0;
  DiskBlock* parent = nullptr;  // the block before it; null: it is the first
  uint64_t hash = 0;
  std::array<int32_t, kKvBlockTokens> tokens = {};
  std::string name = {};                  // its namespace; of first blocks only
  std::vector<uint64_t> layer_sums = {};  // [layers], once it is stored
  std::vector<std::byte> summaries = {};    // likewise; the disk's thread reads them while there are pins
  SlotPlace place = {};
  bool stored = false;    // else it is being written
  bool gone = false;      // nobody finds it any more; its slot is free when nobody uses it
  int pins = 0;           // who reads it, or is about to write what follows
  uint64_t last_use = 0;  // of it or of what follows
  DiskBlock *first_child = nullptr, *next = nullptr, *previous = nullptr;  // siblings
  DiskBlock* twin = nullptr;                                               // another one of the same hash
};

/// A tree for each namespace, in which a block is only while the block before it is. Equality is decided by
/// tokens, names and what stands before, never by a hash. One thread.
class DiskIndex {
 public:
  explicit DiskIndex(const BlockHasher& hasher = BlockHasher());
  ~DiskIndex();
  DiskIndex(const DiskIndex&) = delete;
  DiskIndex& operator=(const DiskIndex&) = delete;

  /// The leading blocks of `tokens` that are here, whether stored or being written.
  std::vector<DiskBlock*> Find(std::string_view name, std::span<const int32_t> tokens) const;
  /// How many of those are stored, without a gap.
  int CountStored(std::string_view name, std::span<const int32_t> tokens) const;

  /// The block of `tokens` [kKvBlockTokens] behind `parent` (null: first of namespace `name`); null: none.
  DiskBlock* Next(DiskBlock* parent, std::string_view name, std::span<const int32_t> tokens) const;

  /// A block of `tokens` [kKvBlockTokens] behind `parent` (null: first of namespace `name`), where none is. It
  /// is in `place`, which must not be free, and being written.
  DiskBlock& Add(DiskBlock* parent, std::string_view name, std::span<const int32_t> tokens, SlotPlace place,
                 uint64_t id);
  void SetStored(DiskBlock& block, std::vector<uint64_t> layer_sums, std::vector<std::byte> summaries);
  /// A request has come upon these: they are the last used.
  void Touch(std::span<DiskBlock* const> chain);
  void Pin(DiskBlock& block);
  void Unpin(DiskBlock& block);

  /// Takes `block` and all that stands behind it out; their slots are free as soon as nobody reads or writes
  /// them. Tells each place that no longer holds anything.
  void Remove(DiskBlock& block, const std::function<void(SlotPlace)>& removed);
  /// Takes all out.
  void Clear();
  /// Takes out the block that was not used for longest, of those behind which none is and that nobody reads
  /// or writes. False: there is none.
  bool EvictOne();
  /// Ends the writing of a block that failed, or that was taken out meanwhile.
  void WritingEnded(DiskBlock& block);

  void AddFree(SlotPlace place) { free_.insert(place); }
  bool has_free() const { return !free_.empty(); }
  /// The one right behind `after` if it is free, so that what is read together lies together; else the first.
  SlotPlace TakeFree(SlotPlace after);

  int blocks() const { return blocks_; }  ///< that can be found
  void CheckStructure() const;            ///< For tests.

 private:
  uint64_t HashBehind(const DiskBlock* parent, std::string_view name, std::span<const int32_t> tokens) const;
  void Unlink(DiskBlock& block);
  void Free(DiskBlock& block);
  bool CanGo(const DiskBlock& block) const;
  void Offer(const DiskBlock& block);
  void Withdraw(const DiskBlock& block) { leaves_.erase({block.last_use, block.id}); }

  const BlockHasher hasher_;
  absl::flat_hash_map<uint64_t, std::unique_ptr<DiskBlock>> by_id_;  // those that are gone but in use too
  absl::flat_hash_map<uint64_t, DiskBlock*> by_hash_;                // twins are chained
  std::set<std::pair<uint64_t, uint64_t>> leaves_;                   // last use and id of those that CanGo
  std::set<SlotPlace> free_;
  uint64_t now_ = 0;
  int blocks_ = 0;
};

}  // namespace moesaic::cache
