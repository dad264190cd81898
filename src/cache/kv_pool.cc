#include "cache/kv_pool.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/check.h"

namespace moesaic::cache {
namespace {

constexpr int64_t kAlignment = 64;  // bytes: one cache line, one AVX-512 register

int64_t AlignUp(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

int64_t RowsBytes(const BlockLayout& layout, int dim) {
  return tensor::BytesOf(layout.dtype, static_cast<int64_t>(layout.heads) * kBlockTokens * dim);
}

}  // namespace

int64_t BlockLayout::keys_bytes() const { return RowsBytes(*this, key_dim); }

int64_t BlockLayout::layer_bytes() const {
  return AlignUp(keys_bytes() + (shared ? 0 : RowsBytes(*this, value_dim)));
}

int64_t BlockLayout::block_bytes() const { return layers * layer_bytes(); }

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

bool BlockRef::unique() const { return pool_ != nullptr && pool_->references_[index_] == 1; }

StatusOr<std::unique_ptr<KvPool>> KvPool::Create(const BlockLayout& layout, int64_t bytes) {
  MOESAIC_CHECK(layout.dtype == tensor::DType::kF32 || layout.dtype == tensor::DType::kBF16);
  MOESAIC_CHECK_LT(0, layout.block_bytes());
  const int64_t blocks =
      std::min<int64_t>(bytes / layout.block_bytes(), std::numeric_limits<int32_t>::max() / kBlockTokens);
  if (blocks < 1) {
    return ResourceExhausted("the KV cache needs at least {} bytes, one block of {} tokens; its budget is {}",
                             layout.block_bytes(), kBlockTokens, bytes);
  }
  ASSIGN_OR_RETURN(runtime::Buffer memory,
                   runtime::Buffer::Allocate(blocks * layout.block_bytes(), /*huge=*/true));
  return std::unique_ptr<KvPool>(new KvPool(layout, std::move(memory), static_cast<int>(blocks)));
}

KvPool::KvPool(const BlockLayout& layout, runtime::Buffer memory, int blocks)
    : layout_(layout), memory_(std::move(memory)), references_(blocks, 0), free_(blocks) {
  for (int i = 0; i < blocks; ++i) free_[i] = blocks - 1 - i;  // block 0 is on top
}

KvPool::~KvPool() { MOESAIC_CHECK_EQ(free_.size(), references_.size()); }

StatusOr<BlockRef> KvPool::Allocate() {
  if (free_.empty()) return ResourceExhausted("no KV block is free, of {}", total_blocks());
  const int32_t index = free_.back();
  free_.pop_back();
  MOESAIC_CHECK_EQ(references_[index], 0);
  references_[index] = 1;
  return BlockRef(this, index);
}

void KvPool::Retain(int32_t index) {
  MOESAIC_CHECK_LT(0, references_[index]);
  ++references_[index];
}

void KvPool::Release(int32_t index) {
  MOESAIC_CHECK_LT(0, references_[index]);
  if (--references_[index] == 0) free_.push_back(index);
}

}  // namespace moesaic::cache
