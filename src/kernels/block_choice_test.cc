// Tests the choice of blocks by importance, groups of rows that share one, and stored choices.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/block_sparsity.h"

namespace moesaic::kernels {
namespace {

TEST(MassHistogramTest, CountsSharesBelowTheirBounds) {
  MassHistogram histogram;
  EXPECT_EQ(histogram.Quantile(0.5), 0);
  for (const double share : {0.0, 1e-4, 2e-4, 0.3, 1.0}) histogram.Add(share);
  EXPECT_EQ(histogram.count(), 5);
  EXPECT_EQ(histogram.counts[0], 2);
  EXPECT_EQ(histogram.counts[1], 1);
  EXPECT_EQ(histogram.Quantile(0.4), 1e-4);
  EXPECT_EQ(histogram.Quantile(0.5), 1e-3);
  EXPECT_EQ(histogram.Quantile(0.8), 0.5);
  EXPECT_EQ(histogram.Quantile(1), 1);
  EXPECT_DOUBLE_EQ(histogram.sum, 1.3003);
}

TEST(ChooseBlocksTest, ReadsKeptBlocksAndTheBestOthers) {
  std::vector<float> importance(20, 0.0F);
  importance[4] = 3;
  importance[9] = 1;
  importance[12] = 2;
  importance[0] = importance[19] = -5;
  std::vector<int32_t> chosen(6);
  ChooseBlocks(importance.data(), 20 * 64 + 3, 6, chosen.data());
  EXPECT_EQ(chosen, (std::vector<int32_t>{0, 4, 9, 12, 19, 20}));
  chosen.resize(5);
  ChooseBlocks(importance.data(), 20 * 64 + 3, 5, chosen.data());
  EXPECT_EQ(chosen, (std::vector<int32_t>{0, 4, 12, 19, 20}));
  importance[7] = std::numeric_limits<float>::quiet_NaN();
  ChooseBlocks(importance.data(), 20 * 64, 5, chosen.data());
  EXPECT_EQ(chosen, (std::vector<int32_t>{0, 4, 7, 19, 20}));
}

// Shares are never negative, but any number is ordered.
TEST(ChooseBlocksTest, OrdersAllNumbers) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<float> importance = {9, -kInfinity, -2, -0.0F, 0, -1e-40F, 1e-40F, kInfinity, -1, 9};
  std::vector<int32_t> order;  // the block that each larger budget adds
  for (int budget = 4; budget <= 11; ++budget) {
    std::vector<int32_t> chosen(budget);
    ChooseBlocks(importance.data(), 10 * 64, budget, chosen.data());
    EXPECT_TRUE(std::ranges::is_sorted(chosen));
    for (const int32_t block : chosen) {
      if (block == 0 || block >= 9) continue;
      if (std::ranges::find(order, block) == order.end()) order.push_back(block);
    }
    EXPECT_EQ(std::ssize(order), budget - 3) << "the blocks of a smaller budget are also chosen";
  }
  EXPECT_EQ(order, (std::vector<int32_t>{7, 6, 4, 3, 5, 8, 2, 1}))
      << "-0 equals 0, and the later block of a tie is chosen first";
}

TEST(ChooseBlocksTest, TiesGoToTheLaterBlock) {
  const std::vector<float> importance(3000, 0.5F);
  std::vector<int32_t> chosen(5);
  ChooseBlocks(importance.data(), 5 * 64, 5, chosen.data());
  EXPECT_EQ(chosen, (std::vector<int32_t>{0, 2, 3, 4, 5}));
  ChooseBlocks(importance.data(), 3000 * 64, 5, chosen.data());
  EXPECT_EQ(chosen, (std::vector<int32_t>{0, 2997, 2998, 2999, 3000}));
}

TEST(KeptChoicesTest, StoresTheLatestChoices) {
  KeptChoices kept(2, 3, 2);
  const std::vector<int32_t> a = {0, 1, 5}, b = {0, 2, 3, 5}, c = {7};
  EXPECT_TRUE(kept.Find(1, 2, 100).empty());
  kept.Put(1, 2, 100, a);
  kept.Put(1, 2, 104, b);
  EXPECT_TRUE(std::ranges::equal(kept.Find(1, 2, 100), a));
  EXPECT_TRUE(std::ranges::equal(kept.Find(1, 2, 104), b));
  EXPECT_TRUE(kept.Find(0, 2, 100).empty());
  EXPECT_TRUE(kept.Find(1, 1, 100).empty());
  kept.Put(1, 2, 104, c);  // the same position again: nothing is evicted
  EXPECT_TRUE(std::ranges::equal(kept.Find(1, 2, 100), a));
  EXPECT_TRUE(std::ranges::equal(kept.Find(1, 2, 104), c));
  kept.Put(1, 2, 64, b);
  EXPECT_TRUE(kept.Find(1, 2, 100).empty());
  EXPECT_TRUE(std::ranges::equal(kept.Find(1, 2, 64), b));
}

TEST(SparsitySettingsTest, RowsOfAGroupHaveOneChooser) {
  const SparsitySettings each = {.budget_blocks = 4};
  const SparsitySettings four = {.budget_blocks = 4, .first_position = 602, .reuse = 4};
  for (int position = 602; position < 800; ++position) {
    EXPECT_EQ(each.ChooserOf(position), position);
    EXPECT_EQ(four.ChooserOf(position), std::max(602, position / 4 * 4));
  }
  // The end of a block also ends a group.
  const SparsitySettings ten = {.budget_blocks = 4, .reuse = 10};
  EXPECT_EQ(ten.ChooserOf(10 * 64 + 63), 10 * 64 + 60);
  EXPECT_EQ(ten.ChooserOf(11 * 64), 11 * 64);
}

}  // namespace
}  // namespace moesaic::kernels
