#include "cache/radix_tree.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace moesaic::cache {
namespace {

// Children that are searched for a partial block: enough for the turns that agents branch into, few enough
// that a system prompt with thousands of users costs nothing.
constexpr int kTailCandidates = 16;

}  // namespace

RadixTree::RadixTree(BlockPool& pool, std::unique_ptr<EvictionPolicy> policy, KvObserver* observer,
                     const prefix::KeyedHasher& hasher)
    : pool_(pool), policy_(std::move(policy)), observer_(observer), index_(kKvBlockTokens, hasher) {}

RadixTree::~RadixTree() {
  for (int32_t block = 0; block < pool_.total_blocks(); ++block) {
    if (index_.contains(block)) pool_.SetCached(index_.payload(block), false);
  }
}

PrefixMatch RadixTree::Find(std::string_view name, std::span<const int32_t> tokens) const {
  PrefixMatch match;
  const auto walked = index_.Walk(name, tokens, [&](int32_t id) {
    if (match.blocks.empty()) match.blocks.reserve(tokens.size() / kKvBlockTokens);  // once: nothing moves
    match.blocks.push_back(index_.payload(id));
  });
  if (walked.node == nullptr) return match;
  FindTail(*walked.node, walked.offset, tokens.subspan(match.blocks.size() * kKvBlockTokens), &match);
  return match;
}

int64_t RadixTree::CountCached(std::string_view name, std::span<const int32_t> tokens) const {
  int64_t blocks = 0;
  index_.Walk(name, tokens, [&](int32_t /*id*/) { ++blocks; });
  return blocks * kKvBlockTokens;
}

// Searches the blocks that follow the first `offset` of `node` for the one that begins most like `tokens`.
void RadixTree::FindTail(const Node& node, size_t offset, std::span<const int32_t> tokens,
                         PrefixMatch* match) const {
  const auto consider = [&](int32_t block) {
    const std::span<const int32_t> there = TokensOf(block);
    const size_t most = std::min(there.size(), tokens.size());
    const auto differs =
        std::mismatch(there.begin(), there.begin() + static_cast<int64_t>(most), tokens.begin());
    const int same = static_cast<int>(differs.first - there.begin());
    if (same <= match->tail_tokens) return;
    match->tail_tokens = same;
    match->tail = index_.payload(block);
  };
  if (offset < node.blocks.size()) return consider(node.blocks[offset]);
  int left = kTailCandidates;
  for (const Node* child = node.first_child; child != nullptr && left > 0; child = child->next, --left) {
    consider(child->blocks.front());
  }
}

void RadixTree::Use(std::span<const BlockRef> blocks) {
  index_.BeginUse();
  if (blocks.empty()) return;
  SplitAfter(blocks.back().index());
  Stamp(blocks, /*counts=*/true, {});
}

void RadixTree::Touch(std::span<const BlockRef> blocks, const SessionHint& hint) {
  const size_t return_too =
      hint.session == Session::kContinues && hint.tokens < std::ssize(blocks) * kKvBlockTokens
          ? KvBlocksFor(hint.tokens)
          : blocks.size();
  if (return_too < blocks.size()) {
    SplitAfter(blocks.back().index());
    Stamp(blocks, /*counts=*/false, {.session = Session::kNotReturning});
  }
  if (return_too == 0) return;
  blocks = blocks.first(return_too);
  SplitAfter(blocks.back().index());
  Stamp(blocks, /*counts=*/false, hint);
}

// Makes the blocks after `block` a node of their own. It keeps the children. Returns the block's position.
RadixTree::Position RadixTree::SplitAfter(int32_t block) {
  const Node& node = *index_.position(block).node;
  if (Node* const front = index_.CutAfter(block)) {
    front->uses = node.uses;
    front->continued = true;
    front->session = node.session;
    front->returns_at = node.returns_at;
  }
  return index_.position(block);
}

void RadixTree::Stamp(std::span<const BlockRef> blocks, bool counts, const SessionHint& hint) {
  if (blocks.empty()) return;
  MOESAIC_CHECK(index_.contains(blocks.back().index()));
  index_.Touch(*index_.position(blocks.back().index()).node, [&](Node& node) {
    node.session = hint.session;
    node.returns_at = hint.returns_at;
    node.open &= !counts;
    if (!node.queued()) return;
    queue_.Withdraw(node);
    Offer(node);
  });
}

void RadixTree::Insert(std::string_view name, std::span<const int32_t> tokens, std::span<BlockRef> blocks,
                       int known) {
  MOESAIC_CHECK_EQ(tokens.size(), blocks.size() * kKvBlockTokens);
  if (known == static_cast<int>(blocks.size())) return;
  Position at;
  if (known == 0) {
    at.node = &index_.AddRoot(name);
  } else {
    MOESAIC_CHECK(index_.contains(blocks[known - 1].index()));
    at = index_.position(blocks[known - 1].index());
  }
  size_t next = known;
  for (; next < blocks.size(); ++next) {
    const Position there = index_.Next(at, KvBlockAt(tokens, next));
    if (!there) break;
    at = there;
    blocks[next] = index_.payload(index_.IdAt(at));
  }
  const size_t first = next;
  std::vector<uint64_t> stored;
  for (; next < blocks.size(); ++next) {
    at = Append(at, blocks[next], KvBlockAt(tokens, next));
    stored.push_back(index_.hash(blocks[next].index()));
  }
  if (observer_ == nullptr || stored.empty()) return;
  observer_->Stored(stored, first == 0 ? std::nullopt : std::optional(index_.hash(blocks[first - 1].index())),
                    tokens.subspan(first * kKvBlockTokens), name);
}

// Adds `block` after `at`, where no such block exists.
RadixTree::Position RadixTree::Append(Position at, const BlockRef& block, std::span<const int32_t> tokens) {
  if (at.node->parent != nullptr) at = SplitAfter(index_.IdAt(at));
  Node& before = *at.node;
  at = index_.Append(at, block.index(), tokens, block, /*extend=*/before.open);
  Node& node = *at.node;
  if (&node != &before) {
    before.uses += std::exchange(before.continued, true) ? 1 : 0;
    node.uses = 1 + policy_->UsesBefore(index_.hash(block.index()));
    node.open = true;
  }
  pool_.SetCached(index_.payload(block.index()), true);
  return at;
}

EvictionCandidate RadixTree::CandidateOf(const Node& node) {
  return {.last_use = node.last_use,
          .uses = node.uses,
          .session = node.session,
          .returns_at = node.returns_at,
          .end_position = node.end() * kKvBlockTokens};
}

bool RadixTree::CanShrink(const Node& node) const {
  return node.first_child == nullptr && index_.payload(node.blocks.back()).unique();
}

void RadixTree::OfferNewlyIdle() {
  for (const int32_t block : pool_.TakeNewlyIdle()) {
    if (!index_.contains(block)) continue;  // it was evicted since
    Node& node = *index_.position(block).node;
    if (node.blocks.back() == block && !node.queued() && CanShrink(node)) Offer(node);
  }
}

int RadixTree::Evict(int count) {
  OfferNewlyIdle();
  int evicted = 0;
  while (evicted < count) {
    Node* const node = First();
    if (node == nullptr) break;
    if (CanShrink(*node)) {
      evicted += Shrink(*node, count - evicted);
    } else {
      queue_.Withdraw(*node);  // it comes back when its last block is idle or its last child is evicted
    }
  }
  evicted_ += evicted;
  return evicted;
}

void RadixTree::Clear() { Evict(pool_.idle_blocks()); }

// Evicts up to `count` idle blocks from the end of `node`; the number evicted.
int RadixTree::Shrink(Node& node, int count) {
  std::vector<uint64_t> removed;
  const EvictionCandidate candidate = CandidateOf(node);
  while (!node.blocks.empty() && static_cast<int>(removed.size()) < count &&
         index_.payload(node.blocks.back()).unique()) {
    const int32_t block = node.blocks.back();
    if (on_evict_) on_evict_(block);
    removed.push_back(index_.hash(block));
    pool_.SetCached(index_.payload(block), false);
    index_.RemoveLast(node);
  }
  node.open = false;
  policy_->OnEvict(candidate, removed.back(), now());
  if (observer_ != nullptr) observer_->Removed(removed);
  if (node.blocks.empty()) {
    if (node.queued()) queue_.Withdraw(node);
    Node* const parent = index_.EraseIfEmpty(node);
    if (parent != nullptr && CanShrink(*parent) && !parent->queued()) Offer(*parent);
  }
  return static_cast<int>(removed.size());
}

void RadixTree::Offer(Node& node) {
  const EvictionCandidate candidate = CandidateOf(node);
  const double returns_at = policy_->ReturnsAt(candidate);
  if (returns_at > static_cast<double>(now())) {
    queue_.AddAway(node, returns_at);
  } else {
    queue_.AddWorth(node, policy_->Worth(candidate),
                    std::max(static_cast<double>(node.last_use), node.returns_at));
  }
}

// The node to evict from now; null: there is none.
RadixTree::Node* RadixTree::First() {
  const auto time = static_cast<double>(now());
  while (EvictionQueue::Entry* due = queue_.Due(time)) {  // its predicted return has passed
    queue_.Withdraw(*due);
    Offer(static_cast<Node&>(*due));
  }
  return static_cast<Node*>(queue_.First(time));
}

void RadixTree::CheckStructure() const {
  index_.CheckStructure();
  for (int32_t block = 0; block < pool_.total_blocks(); ++block) {
    if (!index_.contains(block)) continue;
    const BlockRef& held = index_.payload(block);
    MOESAIC_CHECK(held.index() == block && pool_.cached(block));
    // A holder of a block holds all blocks before it.
    const int32_t before = index_.Parent(block);
    if (before >= 0) MOESAIC_CHECK(held.unique() || !index_.payload(before).unique());
  }
  queue_.CheckStructure();
}

}  // namespace moesaic::cache
