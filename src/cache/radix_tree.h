// The radix tree of cached blocks: it finds the blocks of a prompt's longest cached prefix and evicts idle
// ones. docs/contracts/cache-blocks.md, B9 to B14, is normative.
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

/// The cached prefix of a prompt. Its handles protect the blocks from eviction.
struct PrefixMatch {
  std::vector<BlockRef> blocks;  // whole blocks, from the first token on
  BlockRef tail;                 // one more block whose first `tail_tokens` slots match, if tail_tokens > 0
  int tail_tokens = 0;           // in [0, kKvBlockTokens)

  int64_t tokens() const { return static_cast<int64_t>(blocks.size()) * kKvBlockTokens + tail_tokens; }
  void DropTail() {
    tail = BlockRef();
    tail_tokens = 0;
  }
};

/// Identity of a block of the tree.
struct BlockPath {
  std::string_view name;        // namespace, valid until the tree changes
  std::vector<int32_t> blocks;  // all blocks of its sequence up to itself, in order
};

/// The tree holds one handle of each of its blocks. A node has adjacent blocks that were always used
/// together. Costs are those of PrefixIndex, and O(log nodes) per evicted node. Only Clear visits the whole
/// tree. Engine thread only.
class RadixTree {
 public:
  /// `pool` is borrowed and must outlive the tree; so must `observer`, which may be null.
  RadixTree(BlockPool& pool, std::unique_ptr<EvictionPolicy> policy, KvObserver* observer,
            const prefix::KeyedHasher& hasher = prefix::KeyedHasher());
  ~RadixTree();
  RadixTree(const RadixTree&) = delete;
  RadixTree& operator=(const RadixTree&) = delete;

  /// Returns the longest cached prefix of `tokens` in namespace `name`. Changes only reference counts.
  PrefixMatch Find(std::string_view name, std::span<const int32_t> tokens) const;

  /// Returns the number of leading tokens in whole blocks that Find would return, and changes nothing.
  int64_t CountCached(std::string_view name, std::span<const int32_t> tokens) const;

  /// Records that a request uses `blocks`, which Find returned. Advances the time by one and makes them the
  /// most recently used.
  void Use(std::span<const BlockRef> blocks);
  /// Makes `blocks`, which Find or Insert returned, the most recently used, and applies the client's hint.
  void Touch(std::span<const BlockRef> blocks, const SessionHint& hint);

  /// Adds blocks[known ..], which contain tokens[64 * known ..], after blocks[.. known], which are in the
  /// tree. If the tree has a block of the same tokens, the caller's handle is replaced by that one, so that a
  /// holder of a block holds all blocks before it. tokens: [blocks.size() * kKvBlockTokens].
  void Insert(std::string_view name, std::span<const int32_t> tokens, std::span<BlockRef> blocks, int known);

  /// Sets a function that is called with each block before it is evicted; null: none. It may read the tree
  /// and must not change it.
  void SetEvictionCallback(std::function<void(int32_t block)> callback) { on_evict_ = std::move(callback); }
  /// Evicts up to `count` idle blocks, the least valuable first. Returns the number of evicted blocks.
  int Evict(int count);
  /// Evicts all idle blocks.
  void Clear();

  /// Returns the path of a block of the tree. It may be called during the eviction callback of the block.
  BlockPath PathOf(int32_t block) const {
    return {.name = index_.NameOf(block), .blocks = index_.Path(block)};
  }
  /// Returns the tokens of such a block, [kKvBlockTokens]. Valid until it is evicted.
  std::span<const int32_t> TokensOf(int32_t block) const { return index_.tokens(block); }

  uint64_t now() const { return index_.now(); }   ///< Time: the number of calls of Use.
  int blocks() const { return index_.blocks(); }  ///< Number of blocks, idle or held.
  int nodes() const { return index_.nodes(); }
  int64_t evicted() const { return evicted_; }  ///< Blocks evicted so far.

  /// Aborts if an invariant of the tree is violated. For tests.
  void CheckStructure() const;

 private:
  // The index has the time of a node's last use. The order of eviction is that of a policy, which also weighs
  // predictions, so nodes that may be evicted are in a queue of their own.
  struct NodeState : EvictionQueue::Entry {
    // Number of sequences that continued after it in different ways, or brought it back after eviction.
    uint32_t uses = 1;
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
  Position SplitAfter(int32_t block);
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
  int64_t evicted_ = 0;
};

}  // namespace moesaic::cache
