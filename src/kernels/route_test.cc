// Compares Route with a direct implementation of the routers: sort everything, mask, take the first.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/route.h"
#include "kernels/test_context.h"

namespace moesaic::kernels {
namespace {

using Scoring = RouteParams::Scoring;
using GroupScore = RouteParams::GroupScore;

struct Routed {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Routed RouteWith(RouteParams p, int threads, runtime::Isa isa) {
  TestContext test(isa, threads);
  Routed out{std::vector<int32_t>(p.rows * p.top_k), std::vector<float>(p.rows * p.top_k)};
  p.ids = out.ids.data();
  p.weights = out.weights.data();
  Route(test.context(), p);
  EXPECT_EQ(test.scratch_mark(), 0U);
  return out;
}

class RouteTest : public testing::TestWithParam<runtime::Isa> {};

// Returns the indices of the k largest values, equal ones by index.
std::vector<int> TopK(const std::vector<double>& values, int k) {
  std::vector<int> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return values[a] > values[b]; });
  order.resize(k);
  return order;
}

void Check(const RouteParams& p, const Routed& got) {
  const double infinity = std::numeric_limits<double>::infinity();
  const int size = p.experts / p.groups;
  for (int row = 0; row < p.rows; ++row) {
    const float* logits = p.logits + row * p.experts;
    std::vector<double> scores(p.experts), choice, group_scores;
    const double max = *std::max_element(logits, logits + p.experts);
    double total = 0;
    for (int e = 0; e < p.experts; ++e) {
      scores[e] =
          p.scoring == Scoring::kSigmoid ? 1 / (1 + std::exp(-double{logits[e]})) : std::exp(logits[e] - max);
      total += scores[e];
    }
    if (p.scoring == Scoring::kSoftmax) {
      for (double& s : scores) s /= total;
    }
    choice = scores;
    for (int e = 0; e < p.experts && p.bias != nullptr; ++e) choice[e] += p.bias[e];
    for (int g = 0; g < p.groups; ++g) {
      std::vector<double> group(choice.begin() + g * size, choice.begin() + (g + 1) * size);
      std::sort(group.rbegin(), group.rend());
      group_scores.push_back(p.group_score == GroupScore::kMax || size == 1 ? group[0] : group[0] + group[1]);
    }
    std::vector<bool> open(p.groups, false);
    for (int g : TopK(group_scores, p.top_groups)) open[g] = true;
    for (int e = 0; e < p.experts; ++e) {
      if (!open[e / size]) choice[e] = -infinity;
    }
    const std::vector<int> ids = TopK(choice, p.top_k);
    double sum = p.normalize ? 0 : 1;
    for (int e : ids) sum += p.normalize ? scores[e] : 0;
    for (int j = 0; j < p.top_k; ++j) {
      ASSERT_EQ(got.ids[row * p.top_k + j], ids[j]) << "row " << row << " place " << j;
      const double expected = scores[ids[j]] / sum * p.scale;
      // Tolerance: a sum over all experts at worst, and a few roundings around it.
      ASSERT_NEAR(got.weights[row * p.top_k + j], expected, expected * (p.experts + 8) * 0x1p-24);
    }
  }
}

TEST_P(RouteTest, MatchesDirectImplementation) {
  std::mt19937 rng(1);
  struct Shape {
    int experts, top_k, groups, top_groups;
  };
  for (const Shape s : {Shape{4, 1, 1, 1},
                        {8, 8, 1, 1},
                        {64, 6, 1, 1},
                        {128, 8, 1, 1},
                        {160, 6, 8, 3},
                        {256, 8, 8, 4},
                        {16, 4, 8, 2},
                        {512, 16, 16, 5},
                        {48, 3, 3, 3},
                        {384, 8, 1, 1}}) {
    const int rows = 40;
    const std::vector<float> logits = RandomValues(&rng, size_t(rows) * s.experts, 4);
    const std::vector<float> bias = RandomValues(&rng, s.experts, 2);  // makes many choice scores negative
    for (Scoring scoring : {Scoring::kSoftmax, Scoring::kSigmoid}) {
      for (GroupScore group_score : {GroupScore::kMax, GroupScore::kTopTwoSum}) {
        for (const float* b : {static_cast<const float*>(nullptr), bias.data()}) {
          for (bool normalize : {false, true}) {
            const RouteParams p{.logits = logits.data(),
                                .bias = b,
                                .rows = rows,
                                .experts = s.experts,
                                .top_k = s.top_k,
                                .scoring = scoring,
                                .groups = s.groups,
                                .top_groups = s.top_groups,
                                .group_score = group_score,
                                .normalize = normalize,
                                .scale = 2.5F,
                                .ids = nullptr,
                                .weights = nullptr};
            const Routed alone = RouteWith(p, 1, GetParam());
            Check(p, alone);
            const Routed threaded = RouteWith(p, 3, GetParam());
            EXPECT_EQ(alone.ids, threaded.ids);
            EXPECT_EQ(alone.weights, threaded.weights);
          }
        }
      }
    }
  }
}

// `logits` must outlive the call.
RouteParams Params(const std::vector<float>& logits, int experts, int top_k, Scoring scoring) {
  return {.logits = logits.data(),
          .bias = nullptr,
          .rows = static_cast<int>(logits.size()) / experts,
          .experts = experts,
          .top_k = top_k,
          .scoring = scoring,
          .ids = nullptr,
          .weights = nullptr};
}

TEST_P(RouteTest, TiesGoToTheLowerExpert) {
  const std::vector<float> logits = {1, 3, 2, 3, 2, 3, 0, 2};
  for (Scoring scoring : {Scoring::kSoftmax, Scoring::kSigmoid}) {
    EXPECT_EQ(RouteWith(Params(logits, 8, 5, scoring), 1, GetParam()).ids,
              (std::vector<int32_t>{1, 3, 5, 2, 4}));
  }
  // The logistic function is 1 for both in float, so the larger logit has no effect.
  EXPECT_EQ(RouteWith(Params({0, 40, 60, 0}, 4, 2, Scoring::kSigmoid), 1, GetParam()).ids,
            (std::vector<int32_t>{1, 2}));
}

TEST_P(RouteTest, TiedGroupsGoToTheLowerGroup) {
  const std::vector<float> logits = {1, 2, 2, 1, 0, 2, 2, 0};
  RouteParams p = Params(logits, 8, 2, Scoring::kSigmoid);
  p.groups = 4;
  p.top_groups = 1;
  EXPECT_EQ(RouteWith(p, 1, GetParam()).ids, (std::vector<int32_t>{1, 0}));
}

// Older routers set the scores of excluded groups to 0, which exceeds negative scores of eligible groups. The
// models were trained without that, and transformers now runs without it.
TEST_P(RouteTest, ExcludedGroupsAreNeverChosen) {
  const std::vector<float> bias = {-5, -5, -5, -5, -9, -9, -9, -9};
  const std::vector<float> logits = {0, 0, 0, 0, 9, 9, 9, 9};
  RouteParams p = Params(logits, 8, 3, Scoring::kSigmoid);
  p.bias = bias.data();
  p.groups = 2;
  p.top_groups = 1;
  p.group_score = GroupScore::kTopTwoSum;
  const Routed got = RouteWith(p, 1, GetParam());
  EXPECT_EQ(got.ids, (std::vector<int32_t>{0, 1, 2}));
  EXPECT_EQ(got.weights, (std::vector<float>{0.5F, 0.5F, 0.5F}));  // the bias is not part of the weight
}

TEST_P(RouteTest, OneNaNAmongManyExpertsGivesValidExperts) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::mt19937 rng(4);
  std::vector<float> logits = RandomValues(&rng, 64, 3);
  logits[37] = nan;
  for (bool normalize : {false, true}) {
    RouteParams p = Params(logits, 64, 6, Scoring::kSoftmax);
    p.normalize = normalize;
    const Routed got = RouteWith(p, 1, GetParam());
    for (float weight : got.weights) EXPECT_TRUE(std::isnan(weight));
    std::vector<int32_t> ids = got.ids;
    std::sort(ids.begin(), ids.end());
    EXPECT_EQ(std::unique(ids.begin(), ids.end()), ids.end());
  }
}

// Repeats the tests of tied and excluded groups above in the shapes that vector code supports.
TEST_P(RouteTest, HandlesTiesAndExcludedGroupsOfManyExperts) {
  std::vector<float> logits(64, 1.0F), bias(64, -5.0F);
  std::fill_n(bias.begin() + 32, 32, -9.0F);
  std::fill_n(logits.begin(), 8, -0.0F);
  std::fill_n(logits.begin() + 8, 8, 0.0F);
  RouteParams p = Params(logits, 64, 6, Scoring::kSigmoid);
  p.groups = 4;
  p.top_groups = 1;
  EXPECT_EQ(RouteWith(p, 1, GetParam()).ids, (std::vector<int32_t>{16, 17, 18, 19, 20, 21}));
  p.bias = bias.data();
  p.group_score = GroupScore::kTopTwoSum;
  EXPECT_EQ(RouteWith(p, 1, GetParam()).ids, (std::vector<int32_t>{16, 17, 18, 19, 20, 21}));
  const std::vector<float> both_zeros(logits.begin(), logits.begin() + 16);
  const RouteParams zeros = Params(both_zeros, 16, 3, Scoring::kSoftmax);
  EXPECT_EQ(RouteWith(zeros, 1, GetParam()).ids, (std::vector<int32_t>{0, 1, 2}));
}

TEST_P(RouteTest, NaNGivesDistinctValidExperts) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (Scoring scoring : {Scoring::kSoftmax, Scoring::kSigmoid}) {
    std::vector<int32_t> ids =
        RouteWith(Params({nan, 1, nan, 5, 2, nan, nan, nan}, 8, 6, scoring), 1, GetParam()).ids;
    std::sort(ids.begin(), ids.end());
    EXPECT_EQ(std::unique(ids.begin(), ids.end()), ids.end());
    EXPECT_GE(ids.front(), 0);
    EXPECT_LT(ids.back(), 8);
  }
}

// More ties than one register holds, and values of which many are equal.
TEST_P(RouteTest, HandlesManyTies) {
  std::mt19937 rng(3);
  for (int levels : {1, 2, 5}) {
    std::vector<float> logits(20 * 128);
    for (float& v : logits) v = static_cast<float>(rng() % levels);
    for (Scoring scoring : {Scoring::kSoftmax, Scoring::kSigmoid}) {
      const RouteParams p = Params(logits, 128, 8, scoring);
      Check(p, RouteWith(p, 1, GetParam()));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Host, RouteTest, testing::ValuesIn(runtime::HostIsas(runtime::DetectCpu())),
                         IsaTestName);

}  // namespace
}  // namespace moesaic::kernels
