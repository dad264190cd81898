#include "cache/block_pool.h"

#include <utility>

#include "base/check.h"

namespace moesaic::cache {

BlockRef::BlockRef(const BlockRef& other) : pool_(other.pool_), index_(other.index_) {
  if (pool_ != nullptr) pool_->Retain(index_);
}

BlockRef& BlockRef::operator=(const BlockRef& other) {
  BlockRef copy(other);
  return *this = std::move(copy);
}

BlockRef::BlockRef(BlockRef&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)), index_(std::exchange(other.index_, -1)) {}

BlockRef& BlockRef::operator=(BlockRef&& other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(index_, other.index_);
  return *this;
}

BlockRef::~BlockRef() {
  if (pool_ != nullptr) pool_->Release(index_);
}

bool BlockRef::unique() const { return references() == 1; }

int BlockRef::references() const { return pool_ == nullptr ? 0 : pool_->references_[index_]; }

BlockPool::BlockPool(int blocks) : references_(blocks, 0), free_(blocks), flags_(blocks, 0) {
  for (int i = 0; i < blocks; ++i) free_[i] = blocks - 1 - i;  // block 0 is on top
}

BlockPool::~BlockPool() { MOESAIC_CHECK_EQ(free_.size(), references_.size()); }

StatusOr<BlockRef> BlockPool::Allocate() {
  if (free_.empty()) return ResourceExhausted("no KV block is free, of {}", total_blocks());
  const int32_t index = free_.back();
  free_.pop_back();
  MOESAIC_CHECK_EQ(references_[index], 0);
  references_[index] = 1;
  flags_[index] &= static_cast<uint8_t>(~(kInexact | kAbsent));
  return BlockRef(this, index);
}

void BlockPool::SetAbsent(int32_t index, bool absent) {
  if (absent) {
    flags_[index] |= kAbsent;
  } else {
    flags_[index] &= static_cast<uint8_t>(~kAbsent);
  }
}

void BlockPool::Retain(int32_t index) {
  MOESAIC_CHECK_LT(0, references_[index]);
  if (++references_[index] == 2 && cached(index)) --idle_;
}

void BlockPool::Release(int32_t index) {
  MOESAIC_CHECK_LT(0, references_[index]);
  --references_[index];
  if (references_[index] == 1 && cached(index)) BecomeIdle(index);
  if (references_[index] > 0) return;
  MOESAIC_CHECK(!cached(index));
  free_.push_back(index);
}

void BlockPool::BecomeIdle(int32_t index) {
  ++idle_;
  if (flags_[index] & kListed) return;
  flags_[index] |= kListed;
  newly_idle_.push_back(index);
}

void BlockPool::SetCached(const BlockRef& block, bool cached) {
  const int32_t index = block.index();
  MOESAIC_CHECK(block.pool_ == this && this->cached(index) != cached);
  if (cached) {
    flags_[index] |= kCached;
    if (block.unique()) BecomeIdle(index);
  } else {
    flags_[index] &= static_cast<uint8_t>(~kCached);
    if (block.unique()) --idle_;
  }
}

std::vector<int32_t> BlockPool::TakeNewlyIdle() {
  for (const int32_t index : newly_idle_) flags_[index] &= static_cast<uint8_t>(~kListed);
  return std::exchange(newly_idle_, {});
}

}  // namespace moesaic::cache
