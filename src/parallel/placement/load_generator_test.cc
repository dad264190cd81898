#include "parallel/placement/load_generator.h"

#include <gtest/gtest.h>

#include <numeric>

namespace moesaic::parallel {
namespace {

// Forced-balance generators of other projects left half of the ranks without tokens:
// https://github.com/sgl-project/sglang/pull/37741.
TEST(LoadGenerator, EveryRankReceivesTokensWhenThereAreEnough) {
  for (const Skew skew : {Skew::kLogNormal, Skew::kPowerLaw}) {
    for (const int ranks : {8, 16, 64, 144}) {
      const auto loads = GenerateLoads({.layers = 4, .skew = skew, .tokens_per_layer = 128.0 * 8 * ranks});
      ASSERT_TRUE(loads.ok());
      for (const Workload& workload : *loads) {
        for (int layer = 0; layer < workload.total.layers; ++layer) {
          std::vector<double> rank_tokens(ranks, 0);
          for (int e = 0; e < 256; ++e) rank_tokens[e * ranks / 256] += workload.total.layer(layer)[e];
          for (const double tokens : rank_tokens) EXPECT_GT(tokens, 0);
        }
      }
    }
  }
}

TEST(LoadGenerator, LoadsHaveTheRequestedSkewAndCorrelation) {
  for (const Drift drift : {Drift::kMixtures, Drift::kIndependent}) {
    for (const double correlation : {0.7, 0.9}) {
      const auto loads = GenerateLoads(
          {.layers = 24, .workloads = 12, .spread = 0.7, .drift = drift, .correlation = correlation});
      ASSERT_TRUE(loads.ok());
      double sum = 0;
      int pairs = 0;
      for (size_t a = 0; a < loads->size(); ++a) {
        for (size_t b = a + 1; b < loads->size(); ++b, ++pairs)
          sum += LoadCorrelation((*loads)[a].total, (*loads)[b].total);
      }
      // The shares of mixtures are one draw of twelve.
      EXPECT_NEAR(sum / pairs, correlation, drift == Drift::kMixtures ? 0.1 : 0.03);
      if (drift == Drift::kIndependent) {
        EXPECT_NEAR(FitSkew(loads->front().total).sigma, 0.7, 0.05);
      }
    }
  }
}

TEST(LoadGenerator, TheFitDistinguishesLogNormalFromPowerLaw) {
  const GeneratorOptions normal{.layers = 4, .drift = Drift::kIndependent};
  GeneratorOptions power = normal;
  power.skew = Skew::kPowerLaw;
  const FittedSkew a = FitSkew(GenerateLoads(normal)->front().total);
  EXPECT_LT(a.log_normal_error, a.power_law_error);
  const FittedSkew b = FitSkew(GenerateLoads(power)->front().total);
  EXPECT_LT(b.power_law_error, b.log_normal_error);
  EXPECT_NEAR(b.alpha, power.spread, 0.05);
}

TEST(LoadGenerator, GeneratesLoadsLikeThoseThatAreFitted) {
  for (const Skew skew : {Skew::kLogNormal, Skew::kPowerLaw}) {
    const auto generated = GenerateLoads({.layers = 12,
                                          .workloads = 6,
                                          .skew = skew,
                                          .spread = 0.7,
                                          .drift = Drift::kIndependent,
                                          .correlation = 0.8,
                                          .tokens_per_layer = 1e6});
    std::vector<LoadMatrix> loads;
    for (const Workload& workload : *generated) {
      loads.push_back(workload.total);  // with a dense layer
      loads.back().layers = 13;
      loads.back().tokens.insert(loads.back().tokens.begin(), 256, 0.0);
    }
    GeneratorOptions fit = FitGenerator(loads, /*correlation=*/0.1);
    EXPECT_EQ(fit.layers, 12);
    EXPECT_EQ(fit.experts, 256);
    EXPECT_EQ(fit.skew, skew);
    EXPECT_NEAR(fit.tokens_per_layer, 1e6, 1e4);
    ASSERT_EQ(fit.spreads.size(), 12U);
    // The standard deviation of 256 normal numbers is known to 4.4%.
    EXPECT_NEAR(fit.spreads.front(), 0.56, 0.2 * 0.56);
    EXPECT_NEAR(fit.spreads.back(), 0.84, 0.2 * 0.84);
    fit.seed = 9;
    fit.workloads = 6;
    const auto again = GenerateLoads(fit);
    ASSERT_TRUE(again.ok()) << again.status();
    const std::vector<LoadMatrix> others = Totals(*again);
    const GeneratorOptions second = FitGenerator(others, /*correlation=*/0.1);
    EXPECT_EQ(second.skew, skew);
    EXPECT_NEAR(second.spreads.front(), fit.spreads.front(), 0.2 * fit.spreads.front());
    EXPECT_NEAR(second.correlation, 0.8, 0.06);
    EXPECT_EQ(FitGenerator(std::span(others).first(1), 0.3).correlation, 0.3);
  }
}

// SGLang's recorder counts the dense layers of a model as well, which have no tokens.
TEST(LoadGenerator, LayersWithoutTokensDoNotChangeTheSkew) {
  const auto loads = GenerateLoads({.layers = 4, .workloads = 2});
  LoadMatrix a = (*loads)[0].total, b = (*loads)[1].total;
  const FittedSkew skew = FitSkew(a);
  const double correlation = LoadCorrelation(a, b);
  for (LoadMatrix* load : {&a, &b}) {
    load->layers = 6;
    load->tokens.insert(load->tokens.begin(), 512, 0.0);
  }
  EXPECT_EQ(FitSkew(a).max_over_mean, skew.max_over_mean);
  EXPECT_EQ(FitSkew(a).sigma, skew.sigma);
  EXPECT_EQ(LoadCorrelation(a, b), correlation);
}

TEST(LoadGenerator, TheSeedDeterminesTheLoads) {
  const auto a = GenerateLoads({.layers = 1, .seed = 7}), b = GenerateLoads({.layers = 1, .seed = 7});
  const auto c = GenerateLoads({.layers = 1, .seed = 8});
  EXPECT_EQ(a->front().total.tokens, b->front().total.tokens);
  EXPECT_NE(a->front().total.tokens, c->front().total.tokens);
}

TEST(LoadGenerator, RefusesOptionsOutOfRange) {
  EXPECT_FALSE(GenerateLoads({.layers = 0}).ok());
  EXPECT_FALSE(GenerateLoads({.spread = -1}).ok());
  EXPECT_FALSE(GenerateLoads({.correlation = 1.5}).ok());
  EXPECT_FALSE(GenerateLoads({.layers = 2, .spreads = {0.5}}).ok());
  EXPECT_FALSE(GenerateLoads({.layers = 1, .spreads = {-0.5}}).ok());
}

}  // namespace
}  // namespace moesaic::parallel
