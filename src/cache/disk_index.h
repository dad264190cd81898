// The index of the disk tier: which blocks are on disk, and in which slots of which files.
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

#include "cache/kv_segment.h"
#include "prefix/prefix_index.h"

namespace moesaic::cache {

/// A slot of a file: room for one block.
struct SlotPlace {
  uint64_t segment = 0;  // number of the file
  int slot = 0;
  auto operator<=>(const SlotPlace&) const = default;
};

/// A block that is on disk, or that is being written there.
struct DiskBlock {
  uint64_t id = 0;                        // id of its record
  int32_t node = -1;                      // id in the prefix index
  std::vector<uint64_t> layer_sums = {};  // [layers], once it is stored
  std::vector<std::byte> summaries = {};  // likewise; the I/O thread reads them while the block is pinned
  SlotPlace place = {};
  bool stored = false;   // false: it is being written
  bool removed = false;  // it is no longer in the index; its slot becomes free with the last use of the block
  int pins = 0;          // readers, and writers of blocks that follow
};

/// Contains a block only while it contains the block before it. One thread.
class DiskIndex {
 public:
  explicit DiskIndex(const prefix::KeyedHasher& hasher = prefix::KeyedHasher());
  ~DiskIndex();
  DiskIndex(const DiskIndex&) = delete;
  DiskIndex& operator=(const DiskIndex&) = delete;

  /// Returns the leading blocks of `tokens` that are stored or being written.
  std::vector<DiskBlock*> Find(std::string_view name, std::span<const int32_t> tokens) const;
  /// The block of a record.
  DiskBlock& At(uint64_t id) const { return *by_id_.at(id); }
  /// Returns the number of leading blocks of `tokens` that are stored.
  int CountStored(std::string_view name, std::span<const int32_t> tokens) const;

  /// The block of `tokens` [kKvBlockTokens] after `parent` (null: the first of namespace `name`); null: there
  /// is none.
  DiskBlock* Next(const DiskBlock* parent, std::string_view name, std::span<const int32_t> tokens) const;

  /// Adds a block of `tokens` [kKvBlockTokens] after `parent` (null: the first of namespace `name`), where
  /// there is none. `parent` must belong to the chain that was touched last or have been added since, unless
  /// no chain was touched yet. The block is being written to `place`, which must not be free.
  DiskBlock& Add(const DiskBlock* parent, std::string_view name, std::span<const int32_t> tokens,
                 SlotPlace place, uint64_t id);
  void SetStored(DiskBlock& block, std::vector<uint64_t> layer_sums, std::vector<std::byte> summaries);
  /// Marks the blocks, which Find returned, as the last used.
  void Touch(std::span<DiskBlock* const> chain);
  void Pin(DiskBlock& block);
  void Unpin(DiskBlock& block);

  /// Removes `block` and all blocks after it, and calls `removed` with the place of each. Slots become free
  /// when no thread reads or writes them any more.
  void Remove(DiskBlock& block, const std::function<void(SlotPlace)>& removed);
  /// Removes all blocks.
  void Clear();
  /// Removes the least recently used block among those that no block follows and that no thread reads or
  /// writes. False: no such block exists.
  bool EvictOne();
  /// Ends the write of a block that failed, or that was removed meanwhile.
  void WritingEnded(DiskBlock& block);

  void AddFree(SlotPlace place) { free_.insert(place); }
  bool has_free() const { return !free_.empty(); }
  /// Takes the slot right after `after` if it is free, so that blocks that are read together are contiguous;
  /// else the first free slot.
  SlotPlace TakeFree(SlotPlace after);

  int blocks() const { return index_.blocks(); }  ///< Blocks that Find can return.
  void CheckStructure() const;                    ///< For tests.

 private:
  using Index = prefix::PrefixIndex<DiskBlock*, prefix::NoNodeState, kKvBlockTokens>;

  DiskBlock* Parent(const DiskBlock& block) const;
  uint64_t LastUse(const DiskBlock& block) const { return index_.last_use(block.node); }
  void Unlink(DiskBlock& block);
  void Free(DiskBlock& block);
  bool CanEvict(const DiskBlock& block) const;
  void Offer(const DiskBlock& block);
  void Withdraw(const DiskBlock& block) { leaves_.erase({LastUse(block), block.id}); }

  Index index_;
  absl::flat_hash_map<uint64_t, std::unique_ptr<DiskBlock>> by_id_;  // removed blocks in use, too
  // Last use and id of each block that CanEvict. A block joins when its readers and writers end or its
  // followers are removed, so the order of joining is not the order of use. Older records precede those of
  // equal use.
  std::set<std::pair<uint64_t, uint64_t>> leaves_;
  std::set<SlotPlace> free_;
};

}  // namespace moesaic::cache
