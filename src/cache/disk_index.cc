#include "cache/disk_index.h"

#include <algorithm>

#include "base/check.h"

namespace moesaic::cache {

DiskIndex::DiskIndex(const prefix::KeyedHasher& hasher) : index_(kKvBlockTokens, hasher) {}
DiskIndex::~DiskIndex() = default;

DiskBlock* DiskIndex::Next(const DiskBlock* parent, std::string_view name,
                           std::span<const int32_t> tokens) const {
  Index::Position at;
  if (parent != nullptr) {
    at = index_.position(parent->node);
  } else if (at.node = index_.FindRoot(name); at.node == nullptr) {
    return nullptr;
  }
  at = index_.Next(at, tokens);
  return at ? index_.payload(index_.IdAt(at)) : nullptr;
}

std::vector<DiskBlock*> DiskIndex::Find(std::string_view name, std::span<const int32_t> tokens) const {
  std::vector<DiskBlock*> chain;
  index_.Walk(name, tokens, [&](int32_t node) { chain.push_back(index_.payload(node)); });
  return chain;
}

int DiskIndex::CountStored(std::string_view name, std::span<const int32_t> tokens) const {
  const std::vector<DiskBlock*> chain = Find(name, tokens);
  const auto end = std::ranges::find_if(chain, [](const DiskBlock* block) { return !block->stored; });
  return static_cast<int>(end - chain.begin());
}

DiskBlock& DiskIndex::Add(const DiskBlock* parent, std::string_view name, std::span<const int32_t> tokens,
                          SlotPlace place, uint64_t id) {
  // The index marks the new block as used now, and a block is never older than those that follow it.
  MOESAIC_CHECK(parent == nullptr || (!parent->removed && LastUse(*parent) == index_.now()));
  auto made = std::make_unique<DiskBlock>();
  DiskBlock& block = *made;
  block.id = id;
  block.node = index_.NewId();
  block.place = place;
  MOESAIC_CHECK(by_id_.emplace(id, std::move(made)).second);
  if (parent != nullptr) Withdraw(*parent);
  const auto at =
      parent == nullptr ? Index::Position{.node = &index_.AddRoot(name)} : index_.position(parent->node);
  index_.Append(at, block.node, tokens, &block, /*extend=*/true);
  return block;
}

DiskBlock* DiskIndex::Parent(const DiskBlock& block) const {
  const int32_t parent = index_.Parent(block.node);
  return parent < 0 ? nullptr : index_.payload(parent);
}

bool DiskIndex::CanEvict(const DiskBlock& block) const {
  return block.stored && !block.removed && block.pins == 0 && index_.Follower(block.node) < 0;
}

void DiskIndex::Offer(const DiskBlock& block) {
  if (CanEvict(block)) leaves_.emplace(LastUse(block), block.id);
}

void DiskIndex::SetStored(DiskBlock& block, std::vector<uint64_t> layer_sums,
                          std::vector<std::byte> summaries) {
  block.summaries = std::move(summaries);
  block.layer_sums = std::move(layer_sums);
  block.stored = true;
  Offer(block);
}

void DiskIndex::Touch(std::span<DiskBlock* const> chain) {
  index_.BeginUse();
  if (chain.empty()) return;
  const DiskBlock& last = *chain.back();  // no other block of the chain can be evicted
  Withdraw(last);
  index_.CutAfter(last.node);
  index_.Touch(*index_.position(last.node).node, [](const Index::Node&) {});
  Offer(last);
}

void DiskIndex::Pin(DiskBlock& block) {
  Withdraw(block);
  ++block.pins;
}

void DiskIndex::Unpin(DiskBlock& block) {
  MOESAIC_CHECK_LT(0, block.pins);
  --block.pins;
  if (block.removed) return Free(block);
  Offer(block);
}

void DiskIndex::WritingEnded(DiskBlock& block) {
  block.stored = true;
  if (block.removed) Free(block);
}

// Frees the slot of a removed block that no thread uses any more.
void DiskIndex::Free(DiskBlock& block) {
  MOESAIC_CHECK(block.removed);
  if (block.pins > 0 || !block.stored) return;
  free_.insert(block.place);
  by_id_.erase(block.id);
}

// Removes a block that no block follows from the index.
void DiskIndex::Unlink(DiskBlock& block) {
  MOESAIC_CHECK(!block.removed);
  Withdraw(block);
  DiskBlock* const parent = Parent(block);
  index_.Remove(block.node);
  block.removed = true;
  if (parent != nullptr) Offer(*parent);
}

void DiskIndex::Remove(DiskBlock& block, const std::function<void(SlotPlace)>& removed) {
  for (DiskBlock* last = &block;;) {
    for (int32_t next; (next = index_.Follower(last->node)) >= 0;) last = index_.payload(next);
    DiskBlock* const before = last == &block ? nullptr : Parent(*last);
    removed(last->place);
    Unlink(*last);
    Free(*last);
    if (before == nullptr) return;
    last = before;
  }
}

void DiskIndex::Clear() {
  while (const Index::Node* root = index_.AnyRoot()) {
    Remove(*index_.payload(root->first_child->blocks.front()), [](SlotPlace) {});
  }
}

bool DiskIndex::EvictOne() {
  if (leaves_.empty()) return false;
  DiskBlock& block = *by_id_.at(leaves_.begin()->second);
  Unlink(block);
  Free(block);
  return true;
}

SlotPlace DiskIndex::TakeFree(SlotPlace after) {
  MOESAIC_CHECK(has_free());
  auto it = free_.find({after.segment, after.slot + 1});
  if (it == free_.end()) it = free_.begin();
  const SlotPlace place = *it;
  free_.erase(it);
  return place;
}

void DiskIndex::CheckStructure() const {
  index_.CheckStructure();
  int found = 0;
  size_t leaves = 0;
  std::set<SlotPlace> places = free_;
  for (const auto& [id, block] : by_id_) {
    MOESAIC_CHECK(id == block->id && places.insert(block->place).second);
    if (block->removed) continue;
    ++found;
    MOESAIC_CHECK_EQ(leaves_.count({LastUse(*block), id}), size_t{CanEvict(*block)});
    leaves += CanEvict(*block) ? 1 : 0;
    MOESAIC_CHECK(index_.payload(block->node) == block.get());
    const DiskBlock* const parent = Parent(*block);
    if (parent == nullptr) continue;
    MOESAIC_CHECK(!parent->removed && parent->id < id && by_id_.contains(parent->id));
    MOESAIC_CHECK(LastUse(*parent) >= LastUse(*block));
  }
  MOESAIC_CHECK_EQ(leaves_.size(), leaves);
  MOESAIC_CHECK_EQ(found, index_.blocks());
}

}  // namespace moesaic::cache
