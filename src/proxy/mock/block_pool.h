// Blocks of a mock engine: references, a hash map and an LRU list. Only the library's own files include this
// header.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <cstdint>
#include <vector>

namespace moesaic::proxy {

/// Blocks without references stay in the LRU list, where they can be found by hash until they are taken
/// again.
class MockBlockPool {
 public:
  explicit MockBlockPool(uint32_t blocks);

  uint32_t num_free() const { return num_free_; }
  /// Block with this hash, or -1.
  int32_t Find(uint64_t hash) const;
  void Reference(int32_t block);
  bool IsFree(int32_t block) const { return blocks_[block].references == 0; }
  /// The block goes to the end of the LRU list with its last reference.
  void Release(int32_t block);
  /// Takes the block that was free longest; appends its hash to `evicted` if it had one. Requires num_free()
  /// > 0.
  int32_t Take(std::vector<uint64_t>& evicted);
  /// Makes the block findable; false when another block has the hash already.
  bool SetHash(int32_t block, uint64_t hash);
  /// Forgets the hashes of all free blocks.
  void Clear(std::vector<uint64_t>& evicted);

 private:
  struct Block {
    uint64_t hash = 0;  // 0: none
    uint32_t references = 0;
    int32_t previous = -1, next = -1;  // in the LRU list
  };
  void Append(int32_t block);
  void Unlink(int32_t block);

  std::vector<Block> blocks_;
  absl::flat_hash_map<uint64_t, int32_t> by_hash_;
  int32_t first_ = -1, last_ = -1;
  uint32_t num_free_ = 0;
};

}  // namespace moesaic::proxy
