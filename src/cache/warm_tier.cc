#include "cache/warm_tier.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <utility>

#include "base/check.h"

namespace moesaic::cache {
namespace {

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
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

StatusOr<std::unique_ptr<WarmTier>> WarmTier::Create(const KvLayout& layout, int64_t bytes, bool exact,
                                                     runtime::ThreadPool& threads, int64_t step_bytes) {
  const WarmCodec codec(layout, exact);
  const int64_t each = codec.block_bytes() + kNodeBytes;
  const int64_t room = bytes - RootBytes("");
  if (room < each) {
    return ResourceExhausted(
        "the memory for warm KV blocks must be at least {} bytes, one block of {} tokens; found {}",
        each + RootBytes(""), kKvBlockTokens, bytes);
  }
  ASSIGN_OR_RETURN(std::unique_ptr<SwapSpace> space,
                   SwapSpace::Create(codec.block_bytes(), room / each * codec.block_bytes()));
  const auto step = std::clamp<int64_t>(step_bytes / layout.total_bytes(), 1, std::numeric_limits<int>::max());
  return std::unique_ptr<WarmTier>(
      new WarmTier(codec, std::move(space), threads, bytes, static_cast<int>(step)));
}

WarmTier::WarmTier(const WarmCodec& codec, std::unique_ptr<SwapSpace> space, runtime::ThreadPool& threads,
                   int64_t bytes, int step_blocks)
    : codec_(codec),
      space_(std::move(space)),
      threads_(threads),
      nodes_(0, NodeHash{&hasher_}, NodeEqual{}),
      bytes_(bytes),
      step_blocks_(step_blocks),
      left_(step_blocks) {
  stats_.capacity_blocks = space_->total_blocks();
}

// The name stands in the root and in the map.
int64_t WarmTier::RootBytes(std::string_view name) {
  return kNodeBytes + 2 * static_cast<int64_t>(name.size());
}

int64_t WarmTier::UsedBytes() const {
  return std::ssize(by_use_) * codec_.block_bytes() + static_cast<int64_t>(nodes_.size()) * kNodeBytes +
         root_bytes_;
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
  for (int i = 0; i < static_cast<int>(tokens.size() / kKvBlockTokens) && std::ssize(found) < most; ++i) {
    node = Child(*node, KvBlockAt(tokens, i));
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
    Node* const node = Child(i == 0 ? *root->second : *chain.back(), KvBlockAt(tokens, i));
    if (node == nullptr) break;
    chain.push_back(node);
  }
  for (; !chain.empty(); chain.pop_back()) {
    Node& node = *chain.back();
    if (node.slot != nullptr) by_use_.splice(by_use_.end(), by_use_, node.place);
  }
}

// Says how far nodes for `chain` are there.
void WarmTier::Locate(std::string_view name, Chain chain, bool before_last) {
  if (before_last) {
    if (reached_depth_ <= chain.size()) return;
    reached_ = reached_->parent;
    --reached_depth_;
    MOESAIC_CHECK_EQ(reached_depth_, chain.size());
    return;
  }
  const auto root = roots_.find(name);
  reached_ = root == roots_.end() ? nullptr : root->second.get();
  reached_depth_ = 0;
  if (reached_ == nullptr) return;
  for (; reached_depth_ < chain.size(); ++reached_depth_) {
    Node* const child = Child(*reached_, chain[reached_depth_]);
    if (child == nullptr) return;
    reached_ = child;
  }
}

// The node at the end of `chain`, which was located, made with all that it stands behind where they are not
// there.
WarmTier::Node& WarmTier::Reach(std::string_view name, Chain chain) {
  if (reached_ == nullptr) {
    auto root = std::make_unique<Node>();
    root->name = name;
    reached_ = root.get();
    roots_.emplace(name, std::move(root));
    root_bytes_ += RootBytes(name);
  }
  for (; reached_depth_ < chain.size(); ++reached_depth_) {
    auto made = std::make_unique<Node>();
    Node* const child = made.get();
    child->parent = reached_;
    std::ranges::copy(chain[reached_depth_], child->tokens.begin());
    nodes_.insert(std::move(made));
    ++reached_->children;
    reached_ = child;
  }
  return *reached_;
}

bool WarmTier::IsFinite(const KvBlockView& block) {
  if (codec_.exact()) return true;
  std::atomic<bool> finite = true;
  threads_.Run(codec_.layers(), [&](int64_t layer, int) {
    if (!codec_.IsFinite(block, static_cast<int>(layer))) finite = false;
  });
  return finite;
}

// For the end of `chain`, which was located. Null: all blocks are held by somebody who is about to read them,
// or its names alone are too much.
SwapRef WarmTier::TakeSlot(std::string_view name, Chain chain) {
  if (codec_.block_bytes() + std::ssize(chain) * kNodeBytes + RootBytes(name) > bytes_) return nullptr;
  for (auto it = by_use_.begin();;) {
    const int64_t missing = static_cast<int64_t>(chain.size() - reached_depth_) * kNodeBytes +
                            (reached_ == nullptr ? RootBytes(name) : 0);
    if (UsedBytes() + codec_.block_bytes() + missing <= bytes_) {
      if (SwapRef slot = space_->Take()) return slot;
    }
    while (it != by_use_.end() && (*it)->slot.use_count() > 1) ++it;
    if (it == by_use_.end()) return nullptr;
    Drop(**it++);
    ++stats_.evicted_blocks;
  }
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
    if (reached_ == node) {
      reached_ = parent;
      reached_depth_ -= parent == nullptr ? 0 : 1;
    }
    if (parent == nullptr) {
      root_bytes_ -= RootBytes(node->name);
      roots_.erase(roots_.find(node->name));
      return;
    }
    nodes_.erase(nodes_.find(NodeName{parent, node->tokens}));
    --parent->children;
    node = parent;
  }
}

void WarmTier::Put(std::string_view name, Chain chain, const KvBlockView& block, WarmInRow row) {
  const Clock::time_point start = Clock::now();
  Locate(name, chain, row.before_last);
  if (reached_depth_ == chain.size() && reached_ != nullptr && reached_->slot != nullptr) {
    by_use_.splice(by_use_.end(), by_use_, reached_->place);
    return;
  }
  if (left_ <= row.more) {
    ++stats_.dropped_blocks;
    return;
  }
  --left_;
  // Nothing goes for a block that is not kept, and with what goes, nodes go.
  SwapRef slot = IsFinite(block) ? TakeSlot(name, chain) : nullptr;
  if (slot == nullptr) {
    ++stats_.refused_blocks;
    return;
  }
  threads_.Run(codec_.layers(),
               [&](int64_t layer, int) { codec_.Encode(block, static_cast<int>(layer), space_->At(*slot)); });
  Node& node = Reach(name, chain);
  node.slot = std::move(slot);
  node.place = by_use_.insert(by_use_.end(), &node);
  ++stats_.stored_blocks;
  stats_.store_seconds += SecondsSince(start);
}

void WarmTier::Restore(std::span<const SwapRef> blocks, std::span<const KvBlockView> to) {
  const Clock::time_point start = Clock::now();
  MOESAIC_CHECK_EQ(blocks.size(), to.size());
  const int64_t layers = codec_.layers();
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
  root_bytes_ = 0;
  reached_ = nullptr;
  reached_depth_ = 0;
}

WarmTierStats WarmTier::stats() const {
  WarmTierStats stats = stats_;
  stats.blocks = static_cast<int>(by_use_.size());
  stats.bytes = stats.blocks * codec_.block_bytes();
  return stats;
}

void WarmTier::CheckStructure() const {
  size_t slots = 0;
  int64_t root_bytes = 0;
  absl::flat_hash_set<const Node*> parents;
  for (const auto& [name, root] : roots_) {
    MOESAIC_CHECK(root->name == name && root->parent == nullptr && root->slot == nullptr);
    MOESAIC_CHECK_LT(0, root->children);
    parents.insert(root.get());
    root_bytes += RootBytes(name);
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
  MOESAIC_CHECK_EQ(root_bytes, root_bytes_);
  MOESAIC_CHECK_LE(UsedBytes(), bytes_);
  MOESAIC_CHECK(reached_ == nullptr ? reached_depth_ == 0 : parents.contains(reached_));
}

}  // namespace moesaic::cache
