#include "engine/warm_blocks.h"

#include <algorithm>

#include "base/check.h"

namespace moesaic::engine {

void WarmBlocks::Leaves(int32_t block, bool absent) {
  expected_ = std::max(0, expected_ - 1);
  const size_t before = path_.blocks.size();
  const bool follows = before > 1 && path_.blocks[before - 2] == block;
  if (!keeps_ || absent) {
    path_.blocks.clear();
    return;
  }
  if (follows) {
    path_.blocks.pop_back();
    chain_.pop_back();
  } else {
    path_ = tree_.PathOf(block);
    chain_.clear();
    for (const int32_t each : path_.blocks) chain_.push_back(tree_.TokensOf(each));
  }
  tier_->Put(path_.name, chain_, pool_.ViewOf(block), {.before_last = follows, .more = expected_});
}

std::vector<cache::SwapRef> WarmBlocks::Find(std::string_view name, std::span<const int32_t> tokens,
                                             int known) const {
  return tier_->Find(name, tokens, known, std::min(tier_->step_blocks(), pool_.total_blocks()));
}

void WarmBlocks::Restore(std::string_view name, std::span<const int32_t> tokens,
                         std::span<const cache::SwapRef> warm, std::span<const cache::BlockRef> blocks) {
  std::vector<tensor::KvBlockView> to;
  std::vector<int32_t> numbers;
  for (const cache::BlockRef& block : blocks.last(warm.size())) {
    MOESAIC_CHECK(block.unique());
    to.push_back(pool_.ViewOf(block.index()));
    numbers.push_back(block.index());
    if (!tier_->exact()) pool_.SetLossy(block);
  }
  tier_->Restore(warm, to);
  tier_->Touch(name, tokens, static_cast<int>(blocks.size()));
  if (!tier_->exact()) make_digests_(numbers);
}

void WarmBlocks::WithoutKeeping(const std::function<void()>& release) {
  keeps_ = false;
  release();
  keeps_ = true;
}

}  // namespace moesaic::engine
