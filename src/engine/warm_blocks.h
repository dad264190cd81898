// Blocks between the tree and the warm tier: those that the tree lets go are kept there, those that waiting
// requests lack come back. docs/contracts/kv-tiers.md, W1 to W9, is the law.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "cache/kv_pool.h"
#include "cache/radix_tree.h"
#include "cache/warm_tier.h"

namespace moesaic::engine {

/// Engine thread only.
class WarmBlocks {
 public:
  /// Makes the digests of blocks [count] of the pool again, if they have any, from the keys that stand in
  /// them.
  using MakeDigests = std::function<void(std::span<const int32_t> blocks)>;

  /// `pool` and `tree` are borrowed and must outlive this.
  WarmBlocks(cache::KvPool& pool, const cache::RadixTree& tree, std::unique_ptr<cache::WarmTier> tier,
             MakeDigests make_digests)
      : pool_(pool), tree_(tree), tier_(std::move(tier)), make_digests_(std::move(make_digests)) {}

  /// A step begins: so much may be kept again.
  void StartStep() { tier_->StartStep(); }
  /// The tree is about to let so many blocks go, the least worth first: of more than the step may still keep,
  /// it keeps the last.
  void Expect(int blocks) { expected_ = blocks; }
  /// The tree lets a block go, whose contents still stand, unless it is `absent`: then it is not kept.
  void Leaves(int32_t block, bool absent);
  /// Blocks that stand behind the first `known` of `tokens`, as many as one step takes back.
  std::vector<cache::SwapRef> Find(std::string_view name, std::span<const int32_t> tokens, int known) const;
  /// Puts `warm`, which Find gave, into the last of `blocks`, which hold `tokens` and of which nobody else
  /// has those. They are lossy then, unless the tier is exact.
  void Restore(std::string_view name, std::span<const int32_t> tokens, std::span<const cache::SwapRef> warm,
               std::span<const cache::BlockRef> blocks);
  /// Calls `release`, which has the tree let blocks go: they are not kept.
  void WithoutKeeping(const std::function<void()>& release);
  void Clear() { tier_->Clear(); }  ///< forgets all

  cache::WarmTierStats stats() const { return tier_->stats(); }

 private:
  cache::KvPool& pool_;
  const cache::RadixTree& tree_;
  const std::unique_ptr<cache::WarmTier> tier_;
  const MakeDigests make_digests_;
  bool keeps_ = true;
  int expected_ = 0;
  // Of the block that left last, unless it was not kept; its end is popped when the next one that leaves
  // stands before it. The tokens are the tree's, whose blocks before it stay until they leave.
  cache::BlockPath path_;
  std::vector<std::span<const int32_t>> chain_;
};

}  // namespace moesaic::engine
