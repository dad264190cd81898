#include "quantizer/mixed/sensitivity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "quantizer/test_context.h"

namespace moesaic::quantizer {
namespace {

// Returns groups of 2 to 4 options. More expensive ones mostly lose less, as precisions do; some are useless.
std::vector<KnapsackGroup> RandomGroups(std::mt19937* rng, int count) {
  std::uniform_int_distribution<int> bytes(1, 1000), options(2, 4);
  std::uniform_real_distribution<double> unit(0, 1);
  std::vector<KnapsackGroup> groups;
  for (int g = 0; g < count; ++g) {
    KnapsackGroup group{fmt::format("layers.{}", g), {}};
    const int64_t size = bytes(*rng);
    const double sensitivity = std::exp(6 * unit(*rng));
    for (int o = 0, n = options(*rng); o < n; ++o) {
      group.options.push_back({.name = fmt::format("option{}", o),
                               .loss = sensitivity * std::pow(4.0, -o) * (0.5 + unit(*rng)),
                               .bytes = size * (o + 1)});
    }
    groups.push_back(std::move(group));
  }
  return groups;
}

// Returns the least loss by trying every choice.
double LeastLoss(const std::vector<KnapsackGroup>& groups, double budget, size_t g = 0) {
  if (budget < 0) return std::numeric_limits<double>::infinity();
  if (g == groups.size()) return 0;
  double least = std::numeric_limits<double>::infinity();
  for (const KnapsackOption& o : groups[g].options) {
    least = std::min(least, o.loss + LeastLoss(groups, budget - static_cast<double>(o.bytes), g + 1));
  }
  return least;
}

double Extent(const std::vector<KnapsackGroup>& groups, bool most) {
  double sum = 0;
  for (const KnapsackGroup& group : groups) {
    const KnapsackOption& o = most ? group.options.back() : group.options.front();
    sum += static_cast<double>(o.bytes);
  }
  return sum;
}

TEST(Sensitivity, FindsTheBestOfAllChoices) {
  std::mt19937 rng(1);
  for (int trial = 0; trial < 200; ++trial) {
    const auto groups = RandomGroups(&rng, 1 + trial % 8);
    const double least = Extent(groups, false), most = Extent(groups, true);
    for (const double share : {0.0, 0.1, 0.5, 0.9, 1.0}) {
      const double budget = least + share * (most - least) + 1e-9 * most;
      const auto choice = SolveKnapsack(groups, budget);
      ASSERT_TRUE(choice.ok()) << choice.status();
      EXPECT_TRUE(choice->exact);
      EXPECT_LE(static_cast<double>(choice->bytes), budget);
      EXPECT_NEAR(choice->loss, LeastLoss(groups, budget), 1e-9 * choice->loss);
      EXPECT_EQ(choice->least_loss, choice->loss);
    }
  }
}

TEST(Sensitivity, ManyGroupsAreExactAndLossNeverGrowsWithTheBudget) {
  std::mt19937 rng(2);
  const auto groups = RandomGroups(&rng, 400);
  const double least = Extent(groups, false), most = Extent(groups, true);
  double last = std::numeric_limits<double>::infinity();
  for (int i = 0; i <= 10; ++i) {
    const double budget = least + i * (most - least) / 10;
    const auto choice = SolveKnapsack(groups, budget);
    ASSERT_TRUE(choice.ok());
    EXPECT_TRUE(choice->exact);
    EXPECT_LE(choice->loss, last);
    EXPECT_LE(static_cast<double>(choice->bytes), budget);
    last = choice->loss;
  }
}

TEST(Sensitivity, MixBeatsOnePrecisionAtTheSameSize) {
  std::mt19937 rng(3);
  std::vector<KnapsackGroup> groups = RandomGroups(&rng, 60);
  for (KnapsackGroup& group : groups) {
    while (group.options.size() < 3) group.options.push_back(group.options.back());
  }
  double uniform = 0, bytes = 0;
  for (const KnapsackGroup& group : groups) {
    uniform += group.options[1].loss;
    bytes += static_cast<double>(group.options[1].bytes);
  }
  const auto choice = SolveKnapsack(groups, bytes);
  EXPECT_LT(choice->loss, 0.7 * uniform);
}

// A sensitive layer gets the few bytes that protect it, without a special rule.
TEST(Sensitivity, ProtectsSensitiveGroups) {
  std::vector<KnapsackGroup> groups;
  for (int layer = 0; layer < 8; ++layer) {
    const double times = layer == 7 ? 50 : 1;
    groups.push_back({fmt::format("layers.{}.experts", layer),
                      {{"int4", 0.04 * times, 50}, {"int8", 0.001 * times, 100}, {"bf16", 0, 200}}});
  }
  groups.push_back({"router", {{"int4", 1, 1}, {"int8", 0.1, 2}, {"bf16", 0, 4}}});
  const auto choice = SolveKnapsack(groups, 7 * 50 + 100 + 4);
  EXPECT_THAT(choice->options, testing::ElementsAre(0, 0, 0, 0, 0, 0, 0, 1, 2));
}

TEST(Sensitivity, RejectsATooSmallBudget) {
  const std::vector<KnapsackGroup> groups = {{"a", {{"int4", 1, 10}, {"int8", 0, 20}}}};
  EXPECT_THAT(Message(SolveKnapsack(groups, 9).status()), testing::HasSubstr("10 bytes"));
  const std::vector<KnapsackGroup> bad = {{"a", {{"int4", NAN, 10}}}};
  EXPECT_THAT(Message(SolveKnapsack(bad, 9).status()), testing::HasSubstr("a: int4"));
}

TEST(Sensitivity, MeasuredLossDecreasesWithBits) {
  const TestContext threads(2);
  const int n = 200, k = 256;
  const std::vector<float> weights = TestWeights(n, k, 1), x = TestTokens(1500, k, 1, 2);
  auto hessian = *Hessian::Create(k);
  hessian.Add(threads.ctx, AllTokens(x, k));
  const auto factor = FactorHessian(threads.ctx, hessian, {});
  const auto measure = [&](const Grid& grid, bool gptq) {
    return *MeasureLoss(threads.ctx, grid, weights.data(), n, k, *factor, {}, gptq);
  };
  const Grid int4{GridKind::kInt4Group, 32}, int8{GridKind::kInt8Channel, 0}, fp8{GridKind::kFp8Block, 128},
      nvfp4{GridKind::kNvfp4, 16};
  EXPECT_LT(measure(int8, false), 0.1 * measure(int4, false));
  EXPECT_LT(measure(fp8, false), measure(nvfp4, false));
  for (const Grid& grid : {int4, int8, fp8, nvfp4}) {
    EXPECT_GT(measure(grid, true), 0);
    EXPECT_LT(measure(grid, true), 0.7 * measure(grid, false));
  }
}

}  // namespace
}  // namespace moesaic::quantizer
