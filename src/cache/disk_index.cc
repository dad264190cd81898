#include "cache/disk_index.h"

#include <algorithm>

#include "base/check.h"

namespace moesaic::cache {

DiskIndex::DiskIndex(const BlockHasher& hasher) : hasher_(hasher) {}
DiskIndex::~DiskIndex() = default;

uint64_t DiskIndex::HashBehind(const DiskBlock* parent, std::string_view name,
                               std::span<const int32_t> tokens) const {
  return hasher_.Next(parent == nullptr ? hasher_.Root(name) : parent->hash, tokens);
}

DiskBlock* DiskIndex::Next(DiskBlock* parent, std::string_view name, std::span<const int32_t> tokens) const {
  const auto it = by_hash_.find(HashBehind(parent, name, tokens));
  if (it == by_hash_.end()) return nullptr;
  for (DiskBlock* block = it->second; block != nullptr; block = block->twin) {
    if (block->parent == parent && (parent != nullptr || block->name == name) &&
        std::ranges::equal(block->tokens, tokens)) {
      return block;
    }
  }
  return nullptr;
}

std::vector<DiskBlock*> DiskIndex::Find(std::string_view name, std::span<const int32_t> tokens) const {
  std::vector<DiskBlock*> chain;
  DiskBlock* last = nullptr;
  for (size_t i = 0; i + kKvBlockTokens <= tokens.size(); i += kKvBlockTokens) {
    const auto block = tokens.subspan(i, kKvBlockTokens);
    last = Next(last, name, block);
    if (last == nullptr) break;
    chain.push_back(last);
  }
  return chain;
}

int DiskIndex::CountStored(std::string_view name, std::span<const int32_t> tokens) const {
  const std::vector<DiskBlock*> chain = Find(name, tokens);
  const auto end = std::ranges::find_if(chain, [](const DiskBlock* block) { return !block->stored; });
  return static_cast<int>(end - chain.begin());
}

DiskBlock& DiskIndex::Add(DiskBlock* parent, std::string_view name, std::span<const int32_t> tokens,
                          SlotPlace place, uint64_t id) {
  MOESAIC_CHECK_EQ(tokens.size(), size_t{kKvBlockTokens});
  MOESAIC_CHECK(parent == nullptr || !parent->gone);
  auto made = std::make_unique<DiskBlock>();
  DiskBlock& block = *made;
  block.id = id;
  block.parent = parent;
  block.hash = HashBehind(parent, name, tokens);
  std::ranges::copy(tokens, block.tokens.begin());
  if (parent == nullptr) block.name = name;
  block.place = place;
  block.last_use = parent == nullptr ? now_ : parent->last_use;
  MOESAIC_CHECK(by_id_.emplace(id, std::move(made)).second);
  DiskBlock*& first = by_hash_[block.hash];
  block.twin = first;
  first = &block;
  if (parent != nullptr) {
    Withdraw(*parent);
    block.next = parent->first_child;
    if (block.next != nullptr) block.next->previous = &block;
    parent->first_child = &block;
  }
  ++blocks_;
  return block;
}

bool DiskIndex::CanGo(const DiskBlock& block) const {
  return block.stored && !block.gone && block.pins == 0 && block.first_child == nullptr;
}

void DiskIndex::Offer(const DiskBlock& block) {
  if (CanGo(block)) leaves_.emplace(block.last_use, block.id);
}

void DiskIndex::SetStored(DiskBlock& block, std::vector<uint64_t> layer_sums,
                          std::vector<std::byte> summaries) {
  block.summaries = std::move(summaries);
  block.layer_sums = std::move(layer_sums);
  block.stored = true;
  Offer(block);
}

void DiskIndex::Touch(std::span<DiskBlock* const> chain) {
  ++now_;
  for (DiskBlock* block : chain) {
    Withdraw(*block);
    block->last_use = now_;
    Offer(*block);
  }
}

void DiskIndex::Pin(DiskBlock& block) {
  Withdraw(block);
  ++block.pins;
}

void DiskIndex::Unpin(DiskBlock& block) {
  MOESAIC_CHECK_LT(0, block.pins);
  --block.pins;
  if (block.gone) return Free(block);
  Offer(block);
}

void DiskIndex::WritingEnded(DiskBlock& block) {
  block.stored = true;
  if (block.gone) Free(block);
}

// Ends a block that is gone and that nobody uses any more.
void DiskIndex::Free(DiskBlock& block) {
  MOESAIC_CHECK(block.gone);
  if (block.pins > 0 || !block.stored) return;
  free_.insert(block.place);
  by_id_.erase(block.id);
}

// Out of the tree: nobody finds it from now on.
void DiskIndex::Unlink(DiskBlock& block) {
  MOESAIC_CHECK(!block.gone && block.first_child == nullptr);
  Withdraw(block);
  const auto it = by_hash_.find(block.hash);
  DiskBlock** link = &it->second;
  while (*link != &block) link = &(*link)->twin;
  *link = block.twin;
  if (it->second == nullptr) by_hash_.erase(it);
  if (block.next != nullptr) block.next->previous = block.previous;
  if (block.previous != nullptr) {
    block.previous->next = block.next;
  } else if (block.parent != nullptr) {
    block.parent->first_child = block.next;
    Offer(*block.parent);
  }
  block.gone = true;
  --blocks_;
}

void DiskIndex::Remove(DiskBlock& block, const std::function<void(SlotPlace)>& removed) {
  DiskBlock* const above = block.parent;
  for (DiskBlock* last = &block; last != above;) {
    while (last->first_child != nullptr) last = last->first_child;
    DiskBlock* const before = last->parent;
    const bool end = last == &block;
    removed(last->place);
    Unlink(*last);
    last->parent = nullptr;
    Free(*last);
    if (end) return;
    last = before;
  }
}

void DiskIndex::Clear() {
  std::vector<DiskBlock*> firsts;
  for (const auto& [id, block] : by_id_) {
    if (!block->gone && block->parent == nullptr) firsts.push_back(block.get());
  }
  for (DiskBlock* block : firsts) Remove(*block, [](SlotPlace) {});
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
  int found = 0;
  std::set<SlotPlace> places = free_;
  for (const auto& [id, block] : by_id_) {
    MOESAIC_CHECK(id == block->id && places.insert(block->place).second);
    MOESAIC_CHECK_EQ(leaves_.count({block->last_use, id}), size_t{CanGo(*block)});
    if (block->gone) continue;
    ++found;
    if (block->parent == nullptr) continue;
    MOESAIC_CHECK(!block->parent->gone && block->parent->id < id && by_id_.contains(block->parent->id));
    MOESAIC_CHECK(block->parent->last_use >= block->last_use);
    MOESAIC_CHECK(block->hash == hasher_.Next(block->parent->hash, block->tokens));
  }
  MOESAIC_CHECK_EQ(found, blocks_);
}

}  // namespace moesaic::cache
