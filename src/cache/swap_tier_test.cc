#include "cache/swap_tier.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

namespace moesaic::cache {
namespace {

constexpr KvLayout kSwapLayout = {.layers = 1, .heads = 1, .key_dim = 1, .value_dim = 1};

class SwapTierTest : public testing::Test {
 protected:
  SwapTierTest() {
    for (int i = 0; i < 4; ++i) blocks_.push_back(*pool_.Allocate());
  }
  std::unique_ptr<SwapTier> Open(int slots) {
    return std::make_unique<SwapTier>(pool_, kSwapLayout, slots, /*attention_tokens=*/1000);
  }
  static TierQuery Of(uint64_t request, int indexed_blocks) {
    return {.request = request,
            .indexed_blocks = indexed_blocks,
            .indexed_tokens = int64_t{indexed_blocks} * kKvBlockTokens};
  }

  BlockPool pool_{8};
  std::vector<BlockRef> blocks_;
  KvOps ops_;
};

TEST_F(SwapTierTest, SavesBlocksOutsideTheTreeAtOnceAndOthersWhenTheyAreEvicted) {
  const auto tier = Open(4);
  pool_.SetCached(blocks_[0], true);
  tier->OnPreempt(1, std::span(blocks_).first(3), 150, &ops_);
  ASSERT_EQ(ops_.size(), 2U);
  EXPECT_EQ(ops_[0].block, blocks_[1].index());
  EXPECT_EQ(ops_[1].block, blocks_[2].index());
  EXPECT_FALSE(tier->Lookup(Of(1, 0))) << "the first block is still in the tree";
  const TierHit hit = tier->Lookup(Of(1, 1));
  EXPECT_EQ(hit.blocks, 2);
  EXPECT_EQ(hit.tokens, 150);
  EXPECT_TRUE(hit.with_admission);
  tier->OnEvict({.block = blocks_[0].index()}, &ops_);
  EXPECT_EQ(ops_.size(), 3U);
  EXPECT_EQ(tier->Lookup(Of(1, 0)).blocks, 3);
  pool_.SetCached(blocks_[0], false);
}

TEST_F(SwapTierTest, RestoresBlocksWithTheirMarks) {
  const auto tier = Open(4);
  pool_.SetInexact(blocks_[1]);
  tier->OnPreempt(1, std::span(blocks_).first(2), 128, &ops_);
  std::vector<BlockRef> fresh = {*pool_.Allocate(), *pool_.Allocate()};
  KvOps restores;
  EXPECT_TRUE(tier->Fetch(Of(1, 0), tier->Lookup(Of(1, 0)), fresh, &restores));
  ASSERT_EQ(restores.size(), 2U);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(restores[i].kind, KvOpKind::kRestore);
    EXPECT_EQ(restores[i].block, fresh[i].index());
    EXPECT_EQ(restores[i].slot, ops_[i].slot);
  }
  EXPECT_FALSE(pool_.inexact(fresh[0].index()));
  EXPECT_TRUE(pool_.inexact(fresh[1].index()));
  tier->OnAdmit(1);
  EXPECT_FALSE(tier->Lookup(Of(1, 0)));
  TierStats stats;
  tier->AddStats(&stats);
  EXPECT_EQ(stats.swap.blocks, 0);
  EXPECT_EQ(stats.swap.saved_blocks, 2);
  EXPECT_EQ(stats.swap.restored_blocks, 2);
}

TEST_F(SwapTierTest, ASlotServesAllRequestsForItsBlock) {
  const auto tier = Open(1);
  pool_.SetCached(blocks_[0], true);
  for (const uint64_t request : {1, 2}) tier->OnPreempt(request, std::span(blocks_).first(1), 64, &ops_);
  tier->OnEvict({.block = blocks_[0].index()}, &ops_);
  EXPECT_EQ(ops_.size(), 1U);
  EXPECT_EQ(tier->Lookup(Of(1, 0)).blocks, 1);
  tier->OnEnd(1, "", {});
  EXPECT_EQ(tier->Lookup(Of(2, 0)).blocks, 1);
  tier->OnEnd(2, "", {});
  TierStats stats;
  tier->AddStats(&stats);
  EXPECT_EQ(stats.swap.blocks, 0);
  pool_.SetCached(blocks_[0], false);
}

TEST_F(SwapTierTest, DoesNotCopyCheapTokensOrToAFullArea) {
  const auto tier = Open(1);
  tier->OnPreempt(1, std::span(blocks_).first(2), 100, &ops_);
  EXPECT_EQ(ops_.size(), 1U);
  EXPECT_EQ(tier->Lookup(Of(1, 0)).tokens, 64);
  tier->SetCopyTokens(1000);
  tier->OnPreempt(2, std::span(blocks_).first(2), 100, &ops_);
  EXPECT_EQ(ops_.size(), 1U);
  EXPECT_FALSE(tier->Lookup(Of(2, 0)));
}

TEST_F(SwapTierTest, RefusesABudgetBelowOneBlock) {
  EXPECT_EQ(SwapTier::SlotsFor(kSwapLayout, kSwapLayout.total_bytes() - 1).status().code(),
            StatusCode::kResourceExhausted);
  EXPECT_EQ(*SwapTier::SlotsFor(kSwapLayout, 3 * kSwapLayout.total_bytes() - 1), 2);
}

}  // namespace
}  // namespace moesaic::cache
