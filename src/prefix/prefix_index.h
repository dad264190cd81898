// PrefixIndex: a radix tree over blocks of tokens. It stores the order of blocks and their last use, and
// finds the longest known prefix of a prompt. The user stores a payload with each block, such as the place of
// its bytes.
#pragma once

#include <absl/container/flat_hash_map.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"
#include "prefix/keyed_hash.h"

namespace moesaic::prefix {

/// Empty state of a node, for users that store nothing per node.
struct NoNodeState {};

/// A tree of blocks for each namespace. A block is identified by its namespace, its tokens and the blocks
/// before it; keyed hashes only find candidates. A node has adjacent blocks without a branch between them.
/// Each block has an id, which its user chooses, and a `Payload`; each node has a `NodeState`.
///
/// To find a prefix, the index compares every block and computes one hash per node, unless the child that was
/// used last is the right one. Appending a block computes one hash. Not thread-safe.
///
/// Recency has two forms, and a user needs one of them:
/// - Each node has the time of its last use, which Append and Touch set. Time counts uses (BeginUse). A use
///   costs O(nodes).
/// - Blocks that the user adds with MoveToNewest are in a list, in the order of their last use (oldest,
///   newer). A use costs O(1) for each block.
///
/// kFixedTokens is the number of tokens per block if it is known at compile time, which makes comparisons
/// faster. With 0 the constructor's argument is used.
template <typename Payload, typename NodeState = NoNodeState, int kFixedTokens = 0>
class PrefixIndex {
 public:
  /// Adjacent blocks of one sequence. There is one root per namespace, and it has no blocks.
  struct Node : NodeState {
    Node* parent = nullptr;                                             // null: this node is a root
    Node *first_child = nullptr, *next = nullptr, *previous = nullptr;  // siblings, the newest first
    std::vector<int32_t> blocks;                                        // ids
    int64_t start = 0;                                                  // number of blocks before this node
    uint64_t last_use = 0;  // time of the last use of all its blocks; set by the index only
    std::string name;       // namespace; roots only
    int64_t end() const { return start + static_cast<int64_t>(blocks.size()); }

   private:
    friend class PrefixIndex;
    Node* likely = nullptr;      // child that was used last
    uint64_t likely_tag = 0;     // its tag
    uint64_t tag = 0;            // TagOf the first block
    uint64_t first_hash = 0;     // hash of the first block; of a root: of its namespace
    std::unique_ptr<Node> twin;  // another node with the same first_hash
  };
  /// The place of a block. A root has depth -1. Valid until its node is cut or its block is removed.
  struct Position {
    Node* node = nullptr;  // null: the block does not exist
    int64_t depth = -1;    // number of blocks before it in its sequence
    explicit operator bool() const { return node != nullptr; }
  };
  /// The longest known prefix of a prompt.
  struct Walked {
    // Node of the prefix's last block. An empty prefix has the root, or null if the namespace does not exist.
    Node* node = nullptr;
    size_t offset = 0;  // number of leading blocks of `node` that belong to the prefix
  };

  explicit PrefixIndex(int block_tokens, const KeyedHasher& hasher = KeyedHasher())
      : runtime_tokens_(block_tokens), hasher_(hasher) {
    MOESAIC_CHECK(kFixedTokens == 0 || kFixedTokens == block_tokens);
  }
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;

  int blocks() const { return blocks_; }  ///< number of blocks in all namespaces
  int nodes() const { return nodes_; }    ///< number of nodes, without roots

  /// Returns an id that no block has, for users without ids of their own. Remove makes it available again.
  int32_t NewId() {
    if (free_ids_.empty()) return next_id_++;
    const int32_t id = free_ids_.back();
    free_ids_.pop_back();
    return id;
  }

  bool contains(int32_t id) const {
    const size_t chunk = ChunkOf(id);
    return chunk < entries_.size() && entries_[chunk] != nullptr && entry(id).at.node != nullptr;
  }
  Payload& payload(int32_t id) { return payloads_[ChunkOf(id)][InChunk(id)]; }
  const Payload& payload(int32_t id) const { return payloads_[ChunkOf(id)][InChunk(id)]; }
  /// Returns the tokens of a block, [block_tokens]. Valid while the block is in the index.
  std::span<const int32_t> tokens(int32_t id) const {
    return {TokensAt(id), static_cast<size_t>(block_tokens())};
  }
  uint64_t hash(int32_t id) const { return entry(id).hash; }
  Position position(int32_t id) const { return entry(id).at; }
  uint64_t last_use(int32_t id) const { return position(id).node->last_use; }

  uint64_t now() const { return now_; }  ///< Time: the number of calls of BeginUse.
  void BeginUse() { ++now_; }
  /// Marks the blocks up to the end of `last` as used now. Calls `visit(node)` for each of their nodes,
  /// `last` first. A use that ends inside a node must divide it before (CutAfter).
  template <typename Visit>
  void Touch(Node& last, const Visit& visit) {
    for (Node* node = &last; node->parent != nullptr; node = node->parent) {
      node->last_use = now_;
      Prefer(*node);
      visit(*node);
    }
  }

  /// Makes `id` the most recently used block of the list, and adds it to the list if necessary.
  void MoveToNewest(int32_t id) {
    if (newest_ == id) return;
    if (listed(id)) {
      Detach(entry(id));
    } else {
      ++listed_blocks_;
    }
    entry(id).older = newest_;
    entry(id).newer = kNone;
    (newest_ < 0 ? oldest_ : entry(newest_).newer) = id;
    newest_ = id;
  }
  /// Removes `id` from the list if it is listed.
  void Unlist(int32_t id) {
    if (!listed(id)) return;
    Entry& removed = entry(id);
    Detach(removed);
    removed.older = removed.newer = kUnlisted;
    --listed_blocks_;
  }
  bool listed(int32_t id) const { return entry(id).older != kUnlisted; }
  int listed_blocks() const { return listed_blocks_; }
  /// Returns the least recently used listed block, or -1 if the list is empty.
  int32_t oldest() const { return oldest_; }
  /// Returns the listed block that was used next after listed block `id`, or -1 if there is none.
  int32_t newer(int32_t id) const { return entry(id).newer; }

  /// Returns the root of a namespace, or null if the namespace has no blocks.
  Node* FindRoot(std::string_view name) const {
    const auto it = roots_.find(name);
    return it == roots_.end() ? nullptr : it->second.get();
  }
  /// Returns the root of a namespace, and creates it if necessary. The caller must append a block to a new
  /// root, or erase it with EraseIfEmpty.
  Node& AddRoot(std::string_view name) {
    if (Node* const root = FindRoot(name)) return *root;
    auto made = std::make_unique<Node>();
    made->name = name;
    made->first_hash = hasher_.Root(name);
    return *(roots_[std::string(name)] = std::move(made));
  }
  /// Returns any root, or null if the index is empty.
  Node* AnyRoot() const { return roots_.empty() ? nullptr : roots_.begin()->second.get(); }
  const std::map<std::string, std::unique_ptr<Node>, std::less<>>& roots() const { return roots_; }

  /// Finds the longest known prefix of `tokens`, in whole blocks. Calls `visit(id)` for each of its blocks,
  /// in order.
  template <typename Visit>
  Walked Walk(std::string_view name, std::span<const int32_t> tokens, const Visit& visit) const {
    Walked walked = {.node = FindRoot(name)};
    if (walked.node == nullptr) return walked;
    const size_t whole = tokens.size() / static_cast<size_t>(block_tokens());
    for (size_t done = 0; done < whole;) {
      Node* const child = FindChild(*walked.node, BlockOf(tokens, done));
      if (child == nullptr) break;
      walked.node = child;
      const std::span<const int32_t> ids(child->blocks);
      walked.offset = VisitEqual(ids.first(std::min(ids.size(), whole - done)), tokens, done, visit);
      done += walked.offset;
      if (walked.offset < ids.size()) break;
    }
    return walked;
  }

  /// Returns the position of the block after `at` that has these `tokens` [block_tokens]; false if there is
  /// none.
  Position Next(Position at, std::span<const int32_t> tokens) const {
    if (at.node->parent != nullptr && at.depth + 1 < at.node->end()) {
      return Equal(this->tokens(at.node->blocks[at.depth + 1 - at.node->start]), tokens)
                 ? Position{at.node, at.depth + 1}
                 : Position{};
    }
    Node* const child = FindChild(*at.node, tokens);
    return child == nullptr ? Position{} : Position{child, at.depth + 1};
  }
  int32_t IdAt(Position at) const { return at.node->blocks[at.depth - at.node->start]; }
  /// Returns the id of the block before `id`, or -1 if `id` is the first block of its sequence.
  int32_t Parent(int32_t id) const {
    const Position at = position(id);
    if (at.depth > at.node->start) return at.node->blocks[at.depth - 1 - at.node->start];
    return at.node->parent->parent == nullptr ? -1 : at.node->parent->blocks.back();
  }
  /// Returns the id of one of the blocks after `id`, or -1 if there is none.
  int32_t Follower(int32_t id) const {
    const Position at = position(id);
    if (at.depth + 1 < at.node->end()) return at.node->blocks[at.depth + 1 - at.node->start];
    return at.node->first_child == nullptr ? -1 : at.node->first_child->blocks.front();
  }
  /// Returns the ids of all blocks of the sequence up to and including `id`.
  std::vector<int32_t> Path(int32_t id) const {
    const Position at = position(id);
    std::vector<int32_t> path(static_cast<size_t>(at.depth) + 1);
    size_t end = path.size();
    for (const Node* node = at.node; node->parent != nullptr; node = node->parent) {
      const auto start = static_cast<size_t>(node->start);
      std::copy_n(node->blocks.begin(), end - start, path.begin() + static_cast<int64_t>(start));
      end = start;
    }
    return path;
  }
  /// Returns the namespace of a block. Valid while the index has a block of that namespace.
  std::string_view NameOf(int32_t id) const {
    const Node* node = position(id).node;
    while (node->parent != nullptr) node = node->parent;
    return node->name;
  }

  /// Adds block `id` with `tokens` [block_tokens] after `at` and returns its position. A block with these
  /// tokens must not exist there (see Next). With `extend` the block may join the node of `at`; otherwise it
  /// begins a new node. Marks the node as used now.
  Position Append(Position at, int32_t id, std::span<const int32_t> tokens, Payload payload, bool extend) {
    MOESAIC_CHECK_EQ(tokens.size(), static_cast<size_t>(block_tokens()));
    Node* node = at.node;
    if (node->parent != nullptr && at.depth + 1 < node->end()) {
      node = &Cut(*node, static_cast<size_t>(at.depth + 1 - node->start));
    }
    const uint64_t hash = hasher_.Next(EndHash(*node), tokens);
    Entry& added = AddEntry(id);
    std::ranges::copy(tokens, TokensAt(id));
    added.hash = hash;
    this->payload(id) = std::move(payload);
    if (node->parent == nullptr || !extend || node->first_child != nullptr)
      node = &NewChild(*node, hash, tokens);
    node->blocks.push_back(id);
    node->last_use = now_;
    added.at = {node, at.depth + 1};
    ++blocks_;
    return added.at;
  }

  /// Divides `node`. Returns a new node with its first `count` blocks and a default NodeState. `node` keeps
  /// the other blocks and its children.
  Node& Cut(Node& node, size_t count) {
    MOESAIC_CHECK(0 < count && count < node.blocks.size());
    auto made = std::make_unique<Node>();
    Node& front = *made;
    const auto cut = node.blocks.begin() + static_cast<int64_t>(count);
    front.blocks.assign(node.blocks.begin(), cut);
    node.blocks.erase(node.blocks.begin(), cut);
    for (const int32_t id : front.blocks) entry(id).at.node = &front;
    front.start = node.start;
    front.last_use = node.last_use;
    node.start += static_cast<int64_t>(count);

    std::unique_ptr<Node> rest = Unlink(node);
    front.parent = std::exchange(node.parent, &front);
    front.previous = std::exchange(node.previous, nullptr);
    front.next = std::exchange(node.next, nullptr);
    front.first_child = front.likely = &node;
    front.tag = node.tag;
    front.first_hash = node.first_hash;
    node.first_hash = hash(node.blocks.front());
    front.likely_tag = node.tag = TagOf(tokens(node.blocks.front()));
    if (front.parent->likely == &node) front.parent->likely = &front;
    (front.previous == nullptr ? front.parent->first_child : front.previous->next) = &front;
    if (front.next != nullptr) front.next->previous = &front;
    Link(std::move(made));
    Link(std::move(rest));
    ++nodes_;
    return front;
  }

  /// Divides the node of `id` after that block. Returns the new node, which ends with `id`, or null if the
  /// node ended with `id` before.
  Node* CutAfter(int32_t id) {
    const Position at = position(id);
    return at.depth + 1 == at.node->end()
               ? nullptr
               : &Cut(*at.node, static_cast<size_t>(at.depth + 1 - at.node->start));
  }

  /// Removes the last block of `node`, which must not have children. Before the next call of a method other
  /// than payload, hash and RemoveLast, the caller must call EraseIfEmpty.
  void RemoveLast(Node& node) {
    MOESAIC_CHECK(node.first_child == nullptr);
    const int32_t id = node.blocks.back();
    node.blocks.pop_back();
    Unlist(id);
    entry(id).at = {};
    payload(id) = Payload();
    --blocks_;
  }
  /// Erases `node` if it has neither blocks nor children, and its root if it was the last node of its
  /// namespace. Returns the parent if it has blocks and its last child was erased; otherwise null.
  Node* EraseIfEmpty(Node& node) {
    if (!node.blocks.empty() || node.first_child != nullptr) return nullptr;
    if (node.parent == nullptr) {
      roots_.erase(roots_.find(node.name));
      return nullptr;
    }
    Node& parent = *node.parent;
    const std::unique_ptr<Node> dead = Unlink(node);
    if (parent.likely == &node) parent.likely = nullptr;
    (node.previous == nullptr ? parent.first_child : node.previous->next) = node.next;
    if (node.next != nullptr) node.next->previous = node.previous;
    --nodes_;
    if (parent.first_child != nullptr) return nullptr;
    if (parent.parent != nullptr) return &parent;
    roots_.erase(roots_.find(parent.name));
    return nullptr;
  }
  /// Removes a block without followers. Its id must be from NewId, which may return it again.
  void Remove(int32_t id) {
    const Position at = position(id);
    MOESAIC_CHECK(at.depth + 1 == at.node->end());
    RemoveLast(*at.node);
    EraseIfEmpty(*at.node);
    free_ids_.push_back(id);
  }
  /// Removes all blocks.
  void Clear() {
    by_hash_.clear();
    roots_.clear();
    entries_.clear();
    payloads_.clear();
    tokens_.clear();
    free_ids_.clear();
    next_id_ = blocks_ = nodes_ = listed_blocks_ = 0;
    oldest_ = newest_ = kNone;
  }

  /// Aborts if an invariant of the tree is violated. For tests.
  void CheckStructure() const {
    int blocks = 0, nodes = 0;
    std::vector<const Node*> open;
    for (const auto& [name, root] : roots_) {
      MOESAIC_CHECK(root->name == name && root->blocks.empty() && root->first_child != nullptr);
      open.push_back(root.get());
    }
    while (!open.empty()) {
      const Node& parent = *open.back();
      open.pop_back();
      for (const Node* node = parent.first_child; node != nullptr; node = node->next) {
        MOESAIC_CHECK(node->parent == &parent && node->start == parent.end() && !node->blocks.empty());
        MOESAIC_CHECK(node->next == nullptr || node->next->previous == node);
        MOESAIC_CHECK(node->last_use <= now_);
        MOESAIC_CHECK(node->tag == TagOf(tokens(node->blocks.front())));
        MOESAIC_CHECK(node->first_hash == hash(node->blocks.front()));
        MOESAIC_CHECK(node->likely == nullptr ||
                      (node->likely->parent == node && node->likely->tag == node->likely_tag));
        MOESAIC_CHECK(FindChild(parent, tokens(node->blocks.front())) == node);
        uint64_t expected = EndHash(parent);
        for (size_t i = 0; i < node->blocks.size(); ++i) {
          const int32_t id = node->blocks[i];
          expected = hasher_.Next(expected, tokens(id));
          MOESAIC_CHECK(hash(id) == expected);
          MOESAIC_CHECK(position(id).node == node &&
                        position(id).depth == node->start + static_cast<int64_t>(i));
        }
        blocks += static_cast<int>(node->blocks.size());
        ++nodes;
        open.push_back(node);
      }
    }
    MOESAIC_CHECK_EQ(blocks, blocks_);
    MOESAIC_CHECK_EQ(nodes, nodes_);
    int in_list = 0;
    int32_t older = kNone;
    for (int32_t id = oldest_; id >= 0; older = std::exchange(id, newer(id)), ++in_list) {
      MOESAIC_CHECK(contains(id) && entry(id).older == older);
    }
    MOESAIC_CHECK_EQ(newest_, older);
    MOESAIC_CHECK_EQ(in_list, listed_blocks_);
  }

 private:
  // Blocks whose tokens are prefetched before they are compared: a comparison takes about 10 ns, memory 100.
  static constexpr size_t kAhead = 8;
  static constexpr uint32_t kChunk = 256;  // blocks whose memory is allocated together
  static constexpr int32_t kNone = -1;     // no neighbor in the list
  static constexpr int32_t kUnlisted = -2;

  struct Entry {
    uint64_t hash = 0;
    Position at;                                   // without a node if the id is not in use
    int32_t older = kUnlisted, newer = kUnlisted;  // neighbors in the list
  };
  struct alignas(64) TokenLine {
    std::array<int32_t, 16> tokens;
  };

  constexpr int block_tokens() const { return kFixedTokens > 0 ? kFixedTokens : runtime_tokens_; }
  bool Equal(std::span<const int32_t> a, std::span<const int32_t> b) const {
    return std::memcmp(a.data(), b.data(), static_cast<size_t>(block_tokens()) * sizeof(int32_t)) == 0;
  }
  // Visits the leading `ids` whose tokens are those of blocks `first`, `first` + 1, ... of `tokens`, and
  // returns their number. A visit right after the comparison overlaps with reads of the next tokens.
  template <typename Visit>
  size_t VisitEqual(std::span<const int32_t> ids, std::span<const int32_t> tokens, size_t first,
                    const Visit& visit) const {
    size_t count = 0;
    for (; count < ids.size(); ++count) {
      if (count + kAhead < ids.size()) Prefetch(ids[count + kAhead]);
      if (!Equal(this->tokens(ids[count]), BlockOf(tokens, first + count))) break;
      visit(ids[count]);
    }
    return count;
  }
  // Returns a hash of four tokens of a block, which distinguishes most blocks.
  uint64_t TagOf(std::span<const int32_t> tokens) const {
    const size_t last = tokens.size() - 1;
    const auto at = [&](size_t i) { return static_cast<uint64_t>(static_cast<uint32_t>(tokens[i])); };
    return (at(0) << 32 | at(last / 3)) ^ (at(last * 2 / 3) << 16 | at(last) << 40);
  }
  std::span<const int32_t> BlockOf(std::span<const int32_t> tokens, size_t index) const {
    const auto size = static_cast<size_t>(block_tokens());
    return tokens.subspan(index * size, size);
  }
  void Prefetch(int32_t id) const {
    constexpr int kTokensPerLine = 16;
    const int32_t* const first = tokens(id).data();
    for (int i = 0; i < block_tokens(); i += kTokensPerLine) __builtin_prefetch(first + i);
  }

  static size_t ChunkOf(int32_t id) { return static_cast<uint32_t>(id) / kChunk; }
  static size_t InChunk(int32_t id) { return static_cast<uint32_t>(id) % kChunk; }
  const Entry& entry(int32_t id) const { return entries_[ChunkOf(id)][InChunk(id)]; }
  Entry& entry(int32_t id) { return entries_[ChunkOf(id)][InChunk(id)]; }
  int32_t* TokensAt(int32_t id) const {
    return tokens_[ChunkOf(id)][0].tokens.data() + InChunk(id) * static_cast<size_t>(block_tokens());
  }
  Entry& AddEntry(int32_t id) {
    const size_t chunk = ChunkOf(id);
    if (chunk >= entries_.size()) {
      entries_.resize(chunk + 1);
      payloads_.resize(chunk + 1);
      tokens_.resize(chunk + 1);
    }
    if (entries_[chunk] == nullptr) {
      entries_[chunk] = std::make_unique<Entry[]>(kChunk);
      payloads_[chunk] = std::make_unique<Payload[]>(kChunk);
      tokens_[chunk].reset(new TokenLine[static_cast<size_t>(block_tokens()) * kChunk / 16]);
    }
    Entry& added = entry(id);
    MOESAIC_CHECK(added.at.node == nullptr);
    return added;
  }

  // Marks `node` as the child of its parent that was used last.
  void Prefer(Node& node) {
    node.parent->likely = &node;
    node.parent->likely_tag = node.tag;
  }
  // Connects the neighbors of a listed block with each other.
  void Detach(const Entry& block) {
    (block.older < 0 ? oldest_ : entry(block.older).newer) = block.newer;
    (block.newer < 0 ? newest_ : entry(block.newer).older) = block.older;
  }

  uint64_t EndHash(const Node& node) const {
    return node.parent == nullptr ? node.first_hash : hash(node.blocks.back());
  }

  Node* FindChild(const Node& parent, std::span<const int32_t> tokens) const {
    if (parent.first_child == nullptr) return nullptr;
    // Comparing with the child that was used last costs less than hashing.
    Node* const likely = parent.likely;
    if (likely != nullptr && parent.likely_tag == TagOf(tokens) &&
        Equal(this->tokens(likely->blocks.front()), tokens)) {
      return likely;
    }
    const auto it = by_hash_.find(hasher_.Next(EndHash(parent), tokens));
    if (it == by_hash_.end()) return nullptr;
    for (Node* node = it->second.get(); node != nullptr; node = node->twin.get()) {
      if (node->parent == &parent && Equal(this->tokens(node->blocks.front()), tokens)) return node;
    }
    return nullptr;
  }

  Node& NewChild(Node& parent, uint64_t hash, std::span<const int32_t> tokens) {
    auto made = std::make_unique<Node>();
    Node& node = *made;
    node.parent = &parent;
    node.start = parent.end();
    node.first_hash = hash;
    node.tag = TagOf(tokens);
    node.next = parent.first_child;
    if (node.next != nullptr) node.next->previous = &node;
    parent.first_child = &node;
    Link(std::move(made));
    ++nodes_;
    return node;
  }

  void Link(std::unique_ptr<Node> node) {
    std::unique_ptr<Node>& first = by_hash_[node->first_hash];
    node->twin = std::move(first);
    first = std::move(node);
  }
  std::unique_ptr<Node> Unlink(Node& node) {
    const auto it = by_hash_.find(node.first_hash);
    MOESAIC_CHECK(it != by_hash_.end());
    std::unique_ptr<Node>* link = &it->second;
    while (link->get() != &node) link = &(*link)->twin;
    std::unique_ptr<Node> owned = std::move(*link);
    *link = std::move(owned->twin);
    if (it->second == nullptr) by_hash_.erase(it);
    return owned;
  }

  const int runtime_tokens_;
  const KeyedHasher hasher_;
  std::vector<std::unique_ptr<Entry[]>> entries_;                    // [chunks][kChunk] by id
  std::vector<std::unique_ptr<Payload[]>> payloads_;                 // likewise
  std::vector<std::unique_ptr<TokenLine[]>> tokens_;                 // [chunks][kChunk, block_tokens] by id
  std::map<std::string, std::unique_ptr<Node>, std::less<>> roots_;  // by namespace
  absl::flat_hash_map<uint64_t, std::unique_ptr<Node>> by_hash_;     // by first_hash; twins are chained
  std::vector<int32_t> free_ids_;
  int32_t next_id_ = 0;
  int blocks_ = 0, nodes_ = 0, listed_blocks_ = 0;
  uint64_t now_ = 0;
  int32_t oldest_ = kNone, newest_ = kNone;  // ends of the list
};

}  // namespace moesaic::prefix
