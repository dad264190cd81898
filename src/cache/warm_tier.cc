#include "cache/warm_tier.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "base/check.h"

namespace moesaic::cache {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::span<const int32_t> BlockAt(std::span<const int32_t> tokens, size_t index) {
  return tokens.subspan(index * kBlockTokens, kBlockTokens);
}

}  // namespace

size_t WarmTier::NodeHash::operator()(const NodeName& name) const {
  return hasher->Next(reinterpret_cast<uintptr_t>(name.parent), name.tokens);
}

size_t WarmTier::NodeHash::operator()(const std::unique_ptr<Node>& node) const {
  return (*this)(NodeName{node->parent, node->tokens});
}

bool WarmTier::NodeEqual::operator()(const std::unique_ptr<Node>& node, const NodeName& name) const {
  return node->parent == name.parent && std::ranges::equal(node->tokens, name.tokens);
}

StatusOr<std::unique_ptr<WarmTier>> WarmTier::Create(const BlockLayout& layout, int64_t bytes, bool exact,
                                                     runtime::ThreadPool& threads) {
  const WarmCodec codec(layout, exact);
  // Beside its slot a block has its node, the set's place for it, the list's, and the slot's reference.
  constexpr int64_t kNameBytes = sizeof(Node) + 128;
  const int64_t each = codec.block_bytes() + kNameBytes;
  if (bytes < each) {
    return ResourceExhausted(
        "the memory for warm KV blocks must be at least {} bytes, one block of {} tokens; found {}", each,
        kBlockTokens, bytes);
  }
  ASSIGN_OR_RETURN(std::unique_ptr<SwapSpace> space,
                   SwapSpace::Create(codec.block_bytes(), bytes / each * codec.block_bytes()));
  return std::unique_ptr<WarmTier>(new WarmTier(codec, codec.block_bytes(), std::move(space), threads));
}

WarmTier::WarmTier(const WarmCodec& codec, int64_t block_bytes, std::unique_ptr<SwapSpace> space,
                   runtime::ThreadPool& threads)
    : codec_(codec), space_(std::move(space)), threads_(threads), nodes_(0, NodeHash{&hasher_}, NodeEqual{}) {
  MOESAIC_CHECK_EQ(block_bytes, codec_.block_bytes());
  stats_.capacity_blocks = space_->total_blocks();
}

WarmTier::~WarmTier() = default;

WarmTier::Node* WarmTier::Child(const Node& parent, std::span<const int32_t> tokens) const {
  const auto it = nodes_.find(NodeName{&parent, tokens});
  return it == nodes_.end() ? nullptr : it->get();
}

std::vector<SwapRef> WarmTier::Find(std::string_view name, std::span<const int32_t> tokens, int first,
                                    int most) const {
  std::vector<SwapRef> found;
  const auto root = roots_.find(name);
  if (root == roots_.end()) return found;
  const Node* node = root->second.get();
  for (int i = 0; i < static_cast<int>(tokens.size() / kBlockTokens) && std::ssize(found) < most; ++i) {
    node = Child(*node, BlockAt(tokens, i));
    if (node == nullptr || (i >= first && node->slot == nullptr)) break;
    if (i >= first) found.push_back(node->slot);
  }
  return found;
}

void WarmTier::Touch(std::string_view name, std::span<const int32_t> tokens, int count) {
  const auto root = roots_.find(name);
  if (root == roots_.end()) return;
  std::vector<Node*> chain;
  for (int i = 0; i < count; ++i) {
    Node* const node = Child(i == 0 ? *root->second : *chain.back(), BlockAt(tokens, i));
    if (node == nullptr) break;
    chain.push_back(node);
  }
  for (; !chain.empty(); chain.pop_back()) {
    Node& node = *chain.back();
    if (node.slot != nullptr) by_use_.splice(by_use_.end(), by_use_, node.place);
  }
}

// The node at the end of `chain`, made with all that it stands behind where they are not there.
WarmTier::Node& WarmTier::Reach(std::string_view name, std::span<const std::span<const int32_t>> chain) {
  std::unique_ptr<Node>& root = roots_[std::string(name)];
  if (root == nullptr) {
    root = std::make_unique<Node>();
    root->name = name;
  }
  Node* node = root.get();
  for (const std::span<const int32_t> tokens : chain) {
    Node* child = Child(*node, tokens);
    if (child == nullptr) {
      auto made = std::make_unique<Node>();
      child = made.get();
      child->parent = node;
      std::ranges::copy(tokens, child->tokens.begin());
      nodes_.insert(std::move(made));
      ++node->children;
    }
    node = child;
  }
  return *node;
}

// Null: all blocks are held by somebody who is about to read them.
SwapRef WarmTier::TakeSlot() {
  SwapRef slot = space_->Take();
  for (auto it = by_use_.begin(); slot == nullptr && it != by_use_.end();) {
    Node& node = **it++;
    if (node.slot.use_count() > 1) continue;
    Drop(node);
    ++stats_.evicted_blocks;
    slot = space_->Take();
  }
  return slot;
}

void WarmTier::Drop(Node& node) {
  by_use_.erase(node.place);
  node.slot = nullptr;
  Prune(&node);
}

// Takes out what no block is in or behind.
void WarmTier::Prune(Node* node) {
  while (node->slot == nullptr && node->children == 0) {
    Node* const parent = node->parent;
    if (parent == nullptr) {
      roots_.erase(roots_.find(node->name));
      return;
    }
    nodes_.erase(nodes_.find(NodeName{parent, node->tokens}));
    --parent->children;
    node = parent;
  }
}

void WarmTier::Put(std::string_view name, std::span<const std::span<const int32_t>> chain,
                   const std::byte* block) {
  const Clock::time_point start = Clock::now();
  const auto root = roots_.find(name);
  Node* there = root == roots_.end() ? nullptr : root->second.get();
  for (size_t i = 0; i < chain.size() && there != nullptr; ++i) there = Child(*there, chain[i]);
  if (there != nullptr && there->slot != nullptr) {
    by_use_.splice(by_use_.end(), by_use_, there->place);
    return;
  }
  SwapRef slot = TakeSlot();  // before the node is there: with what goes, nodes go
  Node& node = Reach(name, chain);
  std::atomic<bool> finite = true;
  if (slot != nullptr) {
    const int layers = static_cast<int>(codec_.block_bytes() / codec_.layer_bytes());
    threads_.Run(layers, [&](int64_t layer, int) {
      if (!codec_.Encode(block, static_cast<int>(layer), space_->At(*slot))) finite = false;
    });
  }
  if (slot == nullptr || !finite) {
    ++stats_.refused_blocks;
    Prune(&node);
    return;
  }
  node.slot = std::move(slot);
  node.place = by_use_.insert(by_use_.end(), &node);
  ++stats_.stored_blocks;
  stats_.store_seconds += SecondsSince(start);
}

void WarmTier::Restore(std::span<const SwapRef> blocks, std::span<std::byte* const> to) {
  const Clock::time_point start = Clock::now();
  MOESAIC_CHECK_EQ(blocks.size(), to.size());
  const int64_t layers = codec_.block_bytes() / codec_.layer_bytes();
  threads_.Run(std::ssize(blocks) * layers, [&](int64_t task, int) {
    const size_t i = task / layers;
    codec_.Decode(space_->At(*blocks[i]), static_cast<int>(task % layers), to[i]);
  });
  stats_.restored_blocks += std::ssize(blocks);
  stats_.restore_seconds += SecondsSince(start);
}

void WarmTier::Clear() {
  nodes_.clear();
  by_use_.clear();
  roots_.clear();
}

WarmTierStats WarmTier::stats() const {
  WarmTierStats stats = stats_;
  stats.blocks = static_cast<int>(by_use_.size());
  stats.bytes = stats.blocks * codec_.block_bytes();
  return stats;
}

void WarmTier::CheckStructure() const {
  size_t slots = 0;
  absl::flat_hash_set<const Node*> parents;
  for (const auto& [name, root] : roots_) {
    MOESAIC_CHECK(root->name == name && root->parent == nullptr && root->slot == nullptr);
    MOESAIC_CHECK_LT(0, root->children);
    parents.insert(root.get());
  }
  for (const auto& node : nodes_) parents.insert(node.get());
  for (const auto& node : nodes_) {
    MOESAIC_CHECK(parents.contains(node->parent));
    MOESAIC_CHECK(node->slot != nullptr || node->children > 0);
    if (node->slot == nullptr) continue;
    MOESAIC_CHECK(*node->place == node.get());
    ++slots;
  }
  MOESAIC_CHECK_EQ(slots, by_use_.size());
  MOESAIC_CHECK_LE(static_cast<int>(slots), stats_.capacity_blocks);
}

}  // namespace moesaic::cache
