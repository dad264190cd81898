#include "cache/kv_pool.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "base/check.h"
#include "base/round.h"

namespace moesaic::cache {
namespace {

constexpr int64_t kAlignment = 64;  // bytes: one cache line, one AVX-512 register

int64_t AlignUp(int64_t bytes) { return base::RoundUp(bytes, kAlignment); }

int64_t RowsBytes(const BlockLayout& layout, int dim) {
  return tensor::BytesOf(layout.dtype, static_cast<int64_t>(layout.heads) * kBlockTokens * dim);
}

}  // namespace

int64_t BlockLayout::keys_bytes() const { return RowsBytes(*this, key_dim); }

int64_t BlockLayout::head_bytes() const { return (keys_bytes() + values_bytes()) / heads; }

int64_t BlockLayout::value_offset() const { return shared ? 0 : keys_bytes() / heads; }

int64_t BlockLayout::values_bytes() const { return shared ? 0 : RowsBytes(*this, value_dim); }

int64_t BlockLayout::scales_bytes() const {
  return dtype == tensor::DType::kI8 ? int64_t{2} * heads * kBlockTokens * int64_t{sizeof(float)} : 0;
}

int64_t BlockLayout::layer_bytes() const { return AlignUp(keys_bytes() + values_bytes() + scales_bytes()); }

int64_t BlockLayout::block_bytes() const { return layers * layer_bytes(); }

int64_t BlockLayout::digest_stride() const { return AlignUp(digest_bytes); }

int64_t BlockLayout::pool_bytes() const { return block_bytes() + layers * digest_stride(); }

BlockView BlockLayout::Flat(std::byte* memory) const {
  if (digest_bytes == 0) return {.data = memory};
  return {.data = memory, .digests = memory + block_bytes(), .digest_step = digest_stride()};
}

void BlockLayout::Copy(const BlockView& from, const BlockView& to) const {
  std::memcpy(to.data, from.data, block_bytes());
  for (int layer = 0; layer < layers && digest_bytes > 0; ++layer) {
    std::memcpy(to.digests + layer * to.digest_step, from.digests + layer * from.digest_step,
                digest_stride());
  }
}

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

StatusOr<std::unique_ptr<KvPool>> KvPool::Create(const BlockLayout& layout, int64_t bytes) {
  MOESAIC_CHECK(layout.dtype == tensor::DType::kF32 || layout.dtype == tensor::DType::kBF16 ||
                layout.dtype == tensor::DType::kI8);
  MOESAIC_CHECK_LT(0, layout.block_bytes());
  const int64_t blocks =
      std::min<int64_t>(bytes / layout.pool_bytes(), std::numeric_limits<int32_t>::max() / kBlockTokens);
  if (blocks < 1) {
    return ResourceExhausted("the KV cache needs at least {} bytes, one block of {} tokens; its budget is {}",
                             layout.pool_bytes(), kBlockTokens, bytes);
  }
  ASSIGN_OR_RETURN(runtime::Buffer memory,
                   runtime::Buffer::Allocate(blocks * layout.block_bytes(), /*huge=*/true));
  runtime::Buffer digests;
  if (layout.digest_bytes > 0) {
    ASSIGN_OR_RETURN(digests, runtime::Buffer::Allocate(blocks * layout.layers * layout.digest_stride(),
                                                        /*huge=*/true));
  }
  return std::unique_ptr<KvPool>(
      new KvPool(layout, std::move(memory), std::move(digests), static_cast<int>(blocks)));
}

KvPool::KvPool(const BlockLayout& layout, runtime::Buffer memory, runtime::Buffer digests, int blocks)
    : layout_(layout),
      memory_(std::move(memory)),
      digests_(std::move(digests)),
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

std::byte* KvPool::digests(int layer) const {
  if (layout_.digest_bytes == 0) return nullptr;
  return digests_.data() + int64_t{layer} * total_blocks() * layout_.digest_stride();
}

BlockView KvPool::ViewOf(int32_t block) const {
  if (layout_.digest_bytes == 0) return {.data = At(block)};
  return {.data = At(block),
          .digests = digests(0) + block * layout_.digest_stride(),
          .digest_step = total_blocks() * layout_.digest_stride()};
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
  MOESAIC_CHECK_LE(tokens, kBlockTokens);
  const auto copy_rows = [&](int64_t offset, int64_t head_bytes, int64_t row) {
    for (int head = 0; head < layout_.heads; ++head) {
      const int64_t at = offset + head * head_bytes;
      std::memcpy(At(to.index()) + at, At(from.index()) + at, tokens * row);
    }
  };
  for (int layer = 0; layer < layout_.layers; ++layer) {
    const int64_t offset = layer * layout_.layer_bytes();
    copy_rows(offset, layout_.head_bytes(), tensor::BytesOf(layout_.dtype, layout_.key_dim));
    if (!layout_.shared) {
      copy_rows(offset + layout_.value_offset(), layout_.head_bytes(),
                tensor::BytesOf(layout_.dtype, layout_.value_dim));
    }
    if (layout_.scales_bytes() == 0) continue;
    const int64_t scales = offset + layout_.heads * layout_.head_bytes();
    copy_rows(scales, kBlockTokens * sizeof(float), sizeof(float));
    copy_rows(scales + layout_.scales_bytes() / 2, kBlockTokens * sizeof(float), sizeof(float));
  }
}

}  // namespace moesaic::cache
