#include "cache/swap_space.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <utility>

#include "base/check.h"

namespace moesaic::cache {
namespace {

// One core's copy between two places in memory, until it has been measured.
constexpr double kAssumedBytesPerSecond = 4e9;

}  // namespace

SwapSlot::~SwapSlot() { space_.free_.push_back(index_); }

StatusOr<std::unique_ptr<SwapSpace>> SwapSpace::Create(int64_t slot_bytes, int64_t bytes) {
  MOESAIC_CHECK_LT(0, slot_bytes);
  const int64_t blocks = std::min<int64_t>(bytes / slot_bytes, std::numeric_limits<int>::max());
  if (blocks < 1) {
    return ResourceExhausted("the swap space needs at least {} bytes, one KV block; it has {}", slot_bytes,
                             bytes);
  }
  ASSIGN_OR_RETURN(runtime::Buffer memory, runtime::Buffer::Allocate(blocks * slot_bytes, /*huge=*/true));
  return std::unique_ptr<SwapSpace>(new SwapSpace(slot_bytes, static_cast<int>(blocks), std::move(memory)));
}

SwapSpace::SwapSpace(int64_t slot_bytes, int blocks, runtime::Buffer memory)
    : slot_bytes_(slot_bytes),
      total_(blocks),
      memory_(std::move(memory)),
      free_(blocks),
      copy_seconds_(static_cast<double>(slot_bytes) / kAssumedBytesPerSecond) {
  for (int i = 0; i < blocks; ++i) free_[i] = blocks - 1 - i;
}

SwapSpace::~SwapSpace() { MOESAIC_CHECK_EQ(static_cast<int>(free_.size()), total_); }

SwapRef SwapSpace::Take() {
  if (free_.empty()) return nullptr;
  const int index = free_.back();
  free_.pop_back();
  return std::make_shared<const SwapSlot>(*this, index);
}

SwapRef SwapSpace::Put(const KvPool& pool, int32_t block) {
  SwapRef slot = Take();
  if (slot == nullptr) return nullptr;
  Copy(pool.layout(), pool.ViewOf(block), pool.layout().Flat(At(*slot)));
  ++out_;
  return slot;
}

void SwapSpace::Get(const SwapSlot& slot, const KvPool& pool, int32_t block) {
  Copy(pool.layout(), pool.layout().Flat(At(slot)), pool.ViewOf(block));
  ++in_;
}

void SwapSpace::Copy(const KvLayout& layout, const KvBlockView& from, const KvBlockView& to) {
  MOESAIC_CHECK_EQ(layout.total_bytes(), slot_bytes_);
  const auto start = std::chrono::steady_clock::now();
  layout.Copy(from, to);
  const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  copy_seconds_ += (took - copy_seconds_) / 8;  // follows the machine's load, not one page fault
}

}  // namespace moesaic::cache
