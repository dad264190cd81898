// Which blocks the cache holds, by what stands in them: a radix tree over token ids whose edges are runs of
// whole blocks. docs/contracts/cache-blocks.md is the law.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cache/block_pool.h"
#include "cache/eviction.h"
#include "cache/eviction_queue.h"
#include "cache/kv_events.h"
#include "prefix/prefix_index.h"

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
  RadixTree(BlockPool& pool, std::unique_ptr<EvictionPolicy> policy, KvObserver* observer,
            const prefix::KeyedHasher& hasher = prefix::KeyedHasher());
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

  /// Sets a function that is called with each block before it is evicted; null: none. It may read the tree
  /// and must not change it.
  void SetEvictionCallback(std::function<void(int32_t block)> callback) { on_evict_ = std::move(callback); }
  /// Lets idle blocks go, the least worth first, until `count` have gone; the number that did.
  int Evict(int count);
  /// Lets all idle blocks go.
  void Clear();

  /// Of a block that is here, also while it is about to go.
  BlockPath PathOf(int32_t block) const {
    return {.name = index_.NameOf(block), .blocks = index_.Path(block)};
  }
  /// What such a block holds: [kKvBlockTokens], as long as it is here.
  std::span<const int32_t> TokensOf(int32_t block) const { return index_.tokens(block); }

  uint64_t now() const { return now_; }           ///< the time: calls of Use so far
  int blocks() const { return index_.blocks(); }  ///< idle or not
  int nodes() const { return index_.nodes(); }
  int64_t evicted() const { return evicted_; }  ///< blocks, ever

  /// Checks every rule of the structure; aborts when one does not hold. For tests.
  void CheckStructure() const;

 private:
  struct NodeState : EvictionQueue::Entry {
    uint64_t last_use = 0;
    uint32_t uses =
        1;  // sequences that continued behind it in different ways, or brought it back after eviction
    bool continued = false;  // some block has followed it
    Session session = Session::kNone;
    double returns_at = 0;
    bool open = false;  // only its creator has used it and may extend it
  };
  using Index = prefix::PrefixIndex<BlockRef, NodeState, kKvBlockTokens>;
  using Node = Index::Node;
  using Position = Index::Position;

  void FindTail(const Node& node, size_t offset, std::span<const int32_t> tokens, PrefixMatch* match) const;
  Position Append(Position at, const BlockRef& block, std::span<const int32_t> tokens);
  void CutAfter(Node& node, size_t count);
  void CutBehind(const BlockRef& block);
  void Stamp(std::span<const BlockRef> blocks, bool counts, const SessionHint& hint);
  static EvictionCandidate CandidateOf(const Node& node);
  bool CanShrink(const Node& node) const;
  void OfferNewlyIdle();
  int Shrink(Node& node, int count);
  void Offer(Node& node);
  Node* First();

  BlockPool& pool_;
  const std::unique_ptr<EvictionPolicy> policy_;
  KvObserver* const observer_;
  Index index_;          // by block number
  EvictionQueue queue_;  // nodes without children whose last block was idle when they were added
  std::function<void(int32_t block)> on_evict_;
  uint64_t now_ = 0;  // requests so far
  int64_t evicted_ = 0;
};

}  // namespace moesaic::cache
