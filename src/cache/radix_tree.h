// Which blocks the cache holds, by what stands in them: a radix tree over token ids whose edges are runs of
// whole blocks. docs/contracts/cache-blocks.md is the law.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cache/block_hash.h"
#include "cache/eviction.h"
#include "cache/eviction_queue.h"
#include "cache/kv_events.h"
#include "cache/kv_pool.h"

namespace moesaic::cache {

/// What the tree knows of a prompt. The handles keep the blocks from going while it lives.
struct PrefixMatch {
  std::vector<BlockRef> blocks;  // whole blocks, from the first token on
  BlockRef tail;                 // one block more whose first `tail_tokens` slots fit, when tail_tokens > 0
  int tail_tokens = 0;           // in [0, kKvBlockTokens)

  int64_t tokens() const { return static_cast<int64_t>(blocks.size()) * kKvBlockTokens + tail_tokens; }
  void DropTail() {
    tail = BlockRef();
    tail_tokens = 0;
  }
};

/// Where a block of the tree stands: what names it.
struct BlockPath {
  std::string_view name;        // its namespace; as long as the tree does not change
  std::vector<int32_t> blocks;  // from the first on, it itself at the end
};

/// Holds one handle of each block in it. A node is a run of blocks that have always been used together: runs
/// are cut between blocks, never inside one. Costs: Find, one comparison a block, and one hash a run
/// unless it is the one its predecessor was followed by last; Insert, one hash a block; Evict, O(log runs) a
/// run that goes; nothing ever walks the whole tree but Clear. Engine thread only.
class RadixTree {
 public:
  /// `pool` is borrowed and must outlive the tree; so must `observer`, which may be null.
  RadixTree(KvPool& pool, std::unique_ptr<EvictionPolicy> policy, KvObserver* observer,
            const BlockHasher& hasher = BlockHasher());
  ~RadixTree();
  RadixTree(const RadixTree&) = delete;
  RadixTree& operator=(const RadixTree&) = delete;

  /// The longest prefix of `tokens` in namespace `name` that is here. Changes nothing but handle counts.
  PrefixMatch Find(std::string_view name, std::span<const int32_t> tokens) const;

  /// Says that a request uses `blocks`, which Find gave: time goes on by one, and they are the last used.
  void Use(std::span<const BlockRef> blocks);
  /// Makes `blocks`, which Find or Insert gave, the last used, with what the client knows of their future.
  void Touch(std::span<const BlockRef> blocks, const SessionHint& hint);

  /// Takes in blocks[known ..], full of tokens[64 * known ..], behind blocks[.. known], which are here
  /// already from Find or Insert. Where the tree has a block of the same tokens, the caller's handle is
  /// replaced by that one, so that a holder of a block always holds all blocks before it. tokens:
  /// [blocks.size() * kKvBlockTokens].
  void Insert(std::string_view name, std::span<const int32_t> tokens, std::span<BlockRef> blocks, int known);

  /// Is called with each block that goes before it does, while its contents still stand; null: nothing is. It
  /// must not touch the tree.
  void SetLeaving(std::function<void(int32_t block)> leaving) { leaving_ = std::move(leaving); }
  /// Lets idle blocks go, the least worth first, until `count` have gone; the number that did.
  int Evict(int count);
  /// Lets all idle blocks go.
  void Clear();

  /// Of a block that is here, also while it is about to go.
  BlockPath PathOf(int32_t block) const;
  /// What such a block holds: [kKvBlockTokens], as long as it is here.
  std::span<const int32_t> TokensOf(int32_t block) const;

  uint64_t now() const { return now_; }   ///< the time: calls of Use so far
  int blocks() const { return blocks_; }  ///< idle or not
  int runs() const { return runs_; }
  int64_t evicted() const { return evicted_; }  ///< blocks, ever

  /// Checks every rule of the structure; aborts when one does not hold. For tests.
  void CheckStructure() const;

 private:
  struct Run;
  struct Place {
    Run* run = nullptr;
    int64_t depth = 0;  // blocks before it in its sequence
  };

  uint64_t EndHash(const Run& run) const;
  Run* RootOf(std::string_view name) const;
  Run& MakeRoot(std::string_view name);
  Run* FindChild(const Run& parent, std::span<const int32_t> tokens) const;
  void FindTail(const Run& run, size_t offset, std::span<const int32_t> tokens, PrefixMatch* match) const;
  Place Next(Place place, std::span<const int32_t> tokens) const;
  Place Append(Place place, const BlockRef& block, std::span<const int32_t> tokens);
  Run& NewChild(Run& parent, uint64_t hash);
  Run& CutAfter(Run& run, size_t blocks);
  void Own(std::unique_ptr<Run> run, uint64_t hash);
  std::unique_ptr<Run> Disown(Run& run, uint64_t hash);
  void CutBehind(const BlockRef& block);
  void Stamp(std::span<const BlockRef> blocks, bool counts, const SessionHint& hint);
  EvictionCandidate CandidateOf(const Run& run) const;
  bool CanShrink(const Run& run) const;
  void OfferNewlyIdle();
  int Shrink(Run& run, int count);
  void Drop(Run& run);

  void Offer(Run& run);
  Run* First();

  KvPool& pool_;
  const std::unique_ptr<EvictionPolicy> policy_;
  KvObserver* const observer_;
  const BlockHasher hasher_;
  std::vector<int32_t> tokens_;   // [total blocks, kKvBlockTokens], by block number
  std::vector<uint64_t> hashes_;  // [total blocks]
  std::vector<BlockRef> held_;    // [total blocks]
  std::vector<Place> places_;     // [total blocks]
  std::map<std::string, std::unique_ptr<Run>, std::less<>> roots_;  // by namespace
  absl::flat_hash_map<uint64_t, std::unique_ptr<Run>> by_hash_;     // of the first block; twins are chained
  EvictionQueue queue_;  // runs without children whose last block was idle when they came in
  std::function<void(int32_t block)> leaving_;
  uint64_t now_ = 0;  // requests so far
  int blocks_ = 0, runs_ = 0;
  int64_t evicted_ = 0;
};

}  // namespace moesaic::cache
