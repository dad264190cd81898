#include "cache/kv_pool.h"

#include <algorithm>
#include <limits>
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

StatusOr<std::unique_ptr<KvPool>> KvPool::Create(const KvLayout& layout, int64_t bytes) {
  MOESAIC_CHECK(layout.dtype == tensor::DType::kF32 || layout.dtype == tensor::DType::kBF16 ||
                layout.dtype == tensor::DType::kI8);
  MOESAIC_CHECK_LT(0, layout.block_bytes());
  const int64_t blocks =
      std::min<int64_t>(bytes / layout.total_bytes(), std::numeric_limits<int32_t>::max() / kKvBlockTokens);
  if (blocks < 1) {
    return ResourceExhausted("the KV cache needs at least {} bytes, one block of {} tokens; its budget is {}",
                             layout.total_bytes(), kKvBlockTokens, bytes);
  }
  ASSIGN_OR_RETURN(runtime::Buffer memory,
                   runtime::Buffer::Allocate(blocks * layout.block_bytes(), /*huge=*/true));
  runtime::Buffer summaries;
  if (layout.summary_bytes > 0) {
    ASSIGN_OR_RETURN(summaries, runtime::Buffer::Allocate(blocks * layout.layers * layout.summary_stride(),
                                                        /*huge=*/true));
  }
  return std::unique_ptr<KvPool>(
      new KvPool(layout, std::move(memory), std::move(summaries), static_cast<int>(blocks)));
}

KvPool::KvPool(const KvLayout& layout, runtime::Buffer memory, runtime::Buffer summaries, int blocks)
    : layout_(layout),
      memory_(std::move(memory)),
      summaries_(std::move(summaries)),
      references_(blocks, 0),
      free_(blocks),
      flags_(blocks, 0) {
  for (int i = 0; i < blocks; ++i) free_[i] = blocks - 1 - i;  // block 0 is on top
}

KvPool::~KvPool() { MOESAIC_CHECK_EQ(free_.size(), references_.size()); }

StatusOr<BlockRef> KvPool::Allocate() {
  if (free_.empty()) return ResourceExhausted("no KV block is free, of {}", total_blocks());
  const int32_t index = free_.back();
  free_.pop_back();
  MOESAIC_CHECK_EQ(references_[index], 0);
  references_[index] = 1;
  flags_[index] &= static_cast<uint8_t>(~kLossy);
  return BlockRef(this, index);
}

std::byte* KvPool::summaries(int layer) const {
  if (layout_.summary_bytes == 0) return nullptr;
  return summaries_.data() + int64_t{layer} * total_blocks() * layout_.summary_stride();
}

KvBlockView KvPool::ViewOf(int32_t block) const {
  if (layout_.summary_bytes == 0) return {.data = At(block)};
  return {.data = At(block),
          .summaries = summaries(0) + block * layout_.summary_stride(),
          .summary_step = total_blocks() * layout_.summary_stride()};
}

void KvPool::Retain(int32_t index) {
  MOESAIC_CHECK_LT(0, references_[index]);
  if (++references_[index] == 2 && cached(index)) --idle_;
}

void KvPool::Release(int32_t index) {
  MOESAIC_CHECK_LT(0, references_[index]);
  --references_[index];
  if (references_[index] == 1 && cached(index)) BecomeIdle(index);
  if (references_[index] > 0) return;
  MOESAIC_CHECK(!cached(index));
  free_.push_back(index);
}

void KvPool::BecomeIdle(int32_t index) {
  ++idle_;
  if (flags_[index] & kListed) return;
  flags_[index] |= kListed;
  newly_idle_.push_back(index);
}

void KvPool::SetCached(const BlockRef& block, bool cached) {
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

std::vector<int32_t> KvPool::TakeNewlyIdle() {
  for (const int32_t index : newly_idle_) flags_[index] &= static_cast<uint8_t>(~kListed);
  return std::exchange(newly_idle_, {});
}

void KvPool::CopyTokens(const BlockRef& from, const BlockRef& to, int tokens) {
  MOESAIC_CHECK(to.unique());
  MOESAIC_CHECK_LE(tokens, kKvBlockTokens);
  layout_.CopyTokens({.data = At(from.index())}, {.data = At(to.index())}, tokens);
}

}  // namespace moesaic::cache
