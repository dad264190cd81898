#include "proxy/mock/block_pool.h"

#include "base/check.h"

namespace moesaic::proxy {

MockBlockPool::MockBlockPool(uint32_t blocks) : blocks_(blocks) {
  for (uint32_t i = 0; i < blocks; ++i) Append(static_cast<int32_t>(i));
}

void MockBlockPool::Append(int32_t block) {
  Block& b = blocks_[block];
  b.previous = last_;
  b.next = -1;
  (last_ < 0 ? first_ : blocks_[last_].next) = block;
  last_ = block;
  ++num_free_;
}

void MockBlockPool::Unlink(int32_t block) {
  Block& b = blocks_[block];
  (b.previous < 0 ? first_ : blocks_[b.previous].next) = b.next;
  (b.next < 0 ? last_ : blocks_[b.next].previous) = b.previous;
  --num_free_;
}

int32_t MockBlockPool::Find(uint64_t hash) const {
  const auto it = by_hash_.find(hash);
  return it == by_hash_.end() ? -1 : it->second;
}

void MockBlockPool::Reference(int32_t block) {
  if (blocks_[block].references++ == 0) Unlink(block);
}

void MockBlockPool::Release(int32_t block) {
  MOESAIC_CHECK(blocks_[block].references > 0);
  if (--blocks_[block].references == 0) Append(block);
}

int32_t MockBlockPool::Take(std::vector<uint64_t>& evicted) {
  MOESAIC_CHECK(first_ >= 0);
  const int32_t taken = first_;
  Unlink(taken);
  Block& b = blocks_[taken];
  if (b.hash != 0) {
    evicted.push_back(b.hash);
    by_hash_.erase(b.hash);
    b.hash = 0;
  }
  b.references = 1;
  return taken;
}

bool MockBlockPool::SetHash(int32_t block, uint64_t hash) {
  if (hash == 0 || blocks_[block].hash != 0) return false;
  if (!by_hash_.emplace(hash, block).second) return false;
  blocks_[block].hash = hash;
  return true;
}

void MockBlockPool::Clear(std::vector<uint64_t>& evicted) {
  for (int32_t block = first_; block >= 0; block = blocks_[block].next) {
    if (blocks_[block].hash == 0) continue;
    evicted.push_back(blocks_[block].hash);
    by_hash_.erase(blocks_[block].hash);
    blocks_[block].hash = 0;
  }
}

}  // namespace moesaic::proxy
