#include "engine/warm_blocks.h"

#include <algorithm>

#include "base/check.h"

namespace moesaic::engine {
namespace {

// Of the pool, that one step takes back: about a tenth of a second's reading and writing, beside steps of
// tens of milliseconds to seconds.
constexpr int64_t kBytesPerStep = int64_t{256} << 20;

}  // namespace

void WarmBlocks::Leaves(int32_t block) {
  if (!keeps_) return;
  const cache::BlockPath path = tree_.PathOf(block);
  std::vector<std::span<const int32_t>> chain;
  chain.reserve(path.blocks.size());
  for (const int32_t before : path.blocks) chain.push_back(tree_.TokensOf(before));
  tier_->Put(path.name, chain, pool_.At(block));
}

std::vector<cache::SwapRef> WarmBlocks::Find(std::string_view name, std::span<const int32_t> tokens,
                                             int known) const {
  const int64_t most = std::max<int64_t>(1, kBytesPerStep / pool_.layout().block_bytes());
  return tier_->Find(name, tokens, known, static_cast<int>(std::min<int64_t>(most, pool_.total_blocks())));
}

void WarmBlocks::Restore(std::string_view name, std::span<const int32_t> tokens,
                         std::span<const cache::SwapRef> warm, std::span<const cache::BlockRef> blocks) {
  std::vector<std::byte*> to;
  std::vector<int32_t> numbers;
  for (const cache::BlockRef& block : blocks.last(warm.size())) {
    MOESAIC_CHECK(block.unique());
    to.push_back(pool_.At(block.index()));
    numbers.push_back(block.index());
    if (!tier_->exact()) pool_.SetLossy(block);
  }
  tier_->Restore(warm, to);
  tier_->Touch(name, tokens, static_cast<int>(blocks.size()));
  if (make_digests_ && !tier_->exact()) make_digests_(numbers);
}

void WarmBlocks::WithoutKeeping(const std::function<void()>& release) {
  keeps_ = false;
  release();
  keeps_ = true;
}

}  // namespace moesaic::engine
