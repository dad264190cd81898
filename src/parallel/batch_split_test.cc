#include "parallel/batch_split.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

namespace moesaic::parallel {
namespace {

using testing::ElementsAre;
using testing::SizeIs;

constexpr int kSplitExperts = 24, kSplitRanks = 4;

LayerPlacement RandomReplicas(std::mt19937& random) {
  LayerPlacement layer(kSplitRanks);
  for (int expert = 0; expert < kSplitExperts; ++expert) {
    layer[random() % kSplitRanks].push_back(expert);
    std::vector<int>& other = layer[random() % kSplitRanks];
    if (random() % 2 == 0 && (other.empty() || other.back() != expert)) other.push_back(expert);
  }
  return layer;
}

std::vector<int64_t> RandomCounts(std::mt19937& random) {
  std::vector<int64_t> counts(kSplitExperts);
  for (int64_t& count : counts) count = static_cast<int64_t>(random() % 50 * (random() % 4));
  return counts;
}

TEST(PlanBatch, TheBusiestRankHasTheTokensOfTheOptimum) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 50; ++trial) {
    const LayerPlacement layer = RandomReplicas(random);
    TokenSplit split(layer, kSplitExperts), oracle(layer, kSplitExperts);
    const std::vector<int64_t> tokens = RandomCounts(random);
    const BatchPlan plan = PlanBatch(layer, split, tokens, {});
    EXPECT_EQ(plan.busiest,
              std::ceil(oracle.Solve(std::vector<double>(tokens.begin(), tokens.end())) - 1e-6));
    EXPECT_EQ(plan.all, std::accumulate(tokens.begin(), tokens.end(), int64_t{0}));
  }
}

TEST(PlanBatch, ExpertsOfDeadRanksAreLeftOut) {
  const LayerPlacement layer = {{0, 1}, {0, 3}, {}};  // the last rank had expert 2
  const std::vector<double> speeds = {1, 1, kDeadSpeed};
  TokenSplit split(layer, 4, speeds);
  const BatchPlan plan = PlanBatch(layer, split, std::vector<int64_t>{40, 10, 0, 20}, speeds);
  EXPECT_EQ(plan.busiest, 35);
  EXPECT_EQ(plan.all, 70);
}

std::optional<BatchPlan> Spilled(const LayerPlacement& layer, const std::vector<int64_t>& tokens,
                                 const std::vector<double>& speeds, const SpillOptions& spill) {
  TokenSplit split(layer, static_cast<int>(tokens.size()), speeds);
  return SpillBatch(PlanBatch(layer, split, tokens, speeds), layer, split, tokens, speeds, spill);
}

TEST(SpillBatch, MovesExpertsOfTheBusiestRankWithinTheBudget) {
  const LayerPlacement layer = {{0, 1, 2}, {3, 4, 5}};
  const std::vector<int64_t> tokens = {400, 300, 300, 10, 10, 10};
  SpillOptions spill = {.max_moves = 4, .tolerance = 0.05, .expert_bytes = 100, .max_bytes = 200};
  const auto plan = Spilled(layer, tokens, {}, spill);
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->all, 1030);
  EXPECT_LE(plan->busiest, 541);  // 1.05 of the mean
  EXPECT_LE(plan->spilled.size(), 2U);
  for (const SpillMove& move : plan->spilled) {
    EXPECT_EQ(move.from, 0);
    EXPECT_EQ(move.to, 1);
  }
  EXPECT_THAT(plan->experts[1], SizeIs(3 + plan->spilled.size()));
  spill.max_bytes = 99;
  EXPECT_FALSE(Spilled(layer, tokens, {}, spill).has_value());
}

TEST(SpillBatch, RelievesASlowRankWithFewerTokens) {
  const SpillOptions spill = {.max_moves = 4, .expert_bytes = 1, .max_bytes = 4};
  const auto plan = Spilled({{0}, {1, 2}}, {200, 100, 100}, {1, 0.25}, spill);
  ASSERT_TRUE(plan.has_value());
  EXPECT_GT(plan->busiest, 200);
  EXPECT_LT(plan->slowest, 400);  // from 800
}

TEST(SpillBatch, DeadRanksGetNothing) {
  const SpillOptions spill = {.max_moves = 4, .expert_bytes = 1, .max_bytes = 4};
  const auto plan = Spilled({{0, 1}, {}, {2, 3}}, {90, 80, 1, 1}, {1, kDeadSpeed, 1}, spill);
  ASSERT_TRUE(plan.has_value());
  for (const SpillMove& move : plan->spilled) EXPECT_EQ(move.to, 2);
  EXPECT_THAT(plan->tokens[1], SizeIs(0));
}

// The ranks' own divisions, which each computes alone, add up to the split.
TEST(OwnTokens, SumToTheSplitAndStayOnTheirRankWherePossible) {
  std::mt19937 random(4);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<int64_t> counts(kSplitRanks);
    for (int64_t& count : counts) count = static_cast<int64_t>(random() % 30);
    const int64_t all = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    const std::vector<int> holders = {0, 2, 3};
    const auto first = static_cast<int64_t>(random() % (all + 1)),
               second = static_cast<int64_t>(random() % (all - first + 1));
    const std::vector<int64_t> tokens = {first, second, all - first - second};
    std::vector<int64_t> sums(holders.size(), 0);
    for (int rank = 0; rank < kSplitRanks; ++rank) {
      const std::vector<int64_t> own = OwnTokens(tokens, holders, counts, rank);
      EXPECT_EQ(std::accumulate(own.begin(), own.end(), int64_t{0}), counts[rank]);
      for (size_t i = 0; i < own.size(); ++i) {
        sums[i] += own[i];
        if (holders[i] != rank) continue;
        EXPECT_GE(own[i], std::min(tokens[i], counts[rank]));
      }
    }
    EXPECT_EQ(sums, tokens);
  }
  EXPECT_THAT(OwnTokens(std::vector<int64_t>{5, 5}, std::vector<int>{0, 1}, std::vector<int64_t>{7, 3}, 0),
              ElementsAre(5, 2));
}

}  // namespace
}  // namespace moesaic::parallel
