#include "engine/sampling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>

namespace moesaic::engine {
namespace {

std::vector<float> RandomLogits(int vocab, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 2);
  std::vector<float> logits(vocab);
  for (float& logit : logits) logit = normal(random);
  return logits;
}

Drawn DrawOne(const std::vector<float>& logits, const SamplingParams& sampling, uint64_t seed,
              uint64_t position, const TokenHistory& history = {}, std::vector<int32_t> banned = {}) {
  DrawScratch scratch;
  auto drawn = Draw({.logits = logits,
                     .sampling = &sampling,
                     .history = &history,
                     .banned = banned,
                     .seed = seed,
                     .position = position},
                    scratch);
  EXPECT_TRUE(drawn.ok()) << drawn.status();
  return *drawn;
}

// Returns the distribution that the parameters describe. Reference implementation: each step processes the
// whole vocabulary.
std::map<int32_t, double> Expected(const std::vector<float>& logits, const SamplingParams& sampling) {
  const double greatest = *std::max_element(logits.begin(), logits.end());
  std::vector<std::pair<double, int32_t>> weights;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double weight = std::exp((logits[i] - greatest) / sampling.temperature);
    if (weight >= sampling.min_p) weights.emplace_back(-weight, static_cast<int32_t>(i));
  }
  std::sort(weights.begin(), weights.end());
  if (sampling.top_k > 0 && weights.size() > static_cast<size_t>(sampling.top_k))
    weights.resize(sampling.top_k);
  double total = 0;
  for (const auto& [weight, id] : weights) total -= weight;
  double sum = 0, kept = 0;
  std::map<int32_t, double> shares;
  for (const auto& [weight, id] : weights) {
    if (sampling.top_p < 1 && sum >= sampling.top_p * total) break;
    sum -= weight;
    kept = sum;
    shares[id] = -weight;
  }
  for (auto& [id, share] : shares) share /= kept;
  return shares;
}

TEST(DrawTest, GreedyTakesTheFirstMaximum) {
  SamplingParams greedy;
  greedy.temperature = 0;
  EXPECT_EQ(DrawOne({1, 3, 2}, greedy, 1, 1).token, 1);
  EXPECT_EQ(DrawOne({1, 3, 3}, greedy, 1, 1).token, 1);
}

TEST(DrawTest, BannedTokensAreNeverDrawn) {
  SamplingParams greedy;
  greedy.temperature = 0;
  EXPECT_EQ(DrawOne({1, 3, 2}, greedy, 1, 1, {}, {1}).token, 2);
  SamplingParams hot;
  hot.temperature = 50;
  for (int i = 0; i < 200; ++i) EXPECT_NE(DrawOne({1, 3, 2}, hot, 1, i, {}, {1}).token, 1);
}

TEST(DrawTest, RefusesLogitsWithoutAFiniteMaximum) {
  const float nan = std::numeric_limits<float>::quiet_NaN(),
              infinity = std::numeric_limits<float>::infinity();
  for (const auto& logits :
       std::vector<std::vector<float>>{{nan, 1}, {1, nan}, {-infinity, -infinity}, {infinity, 1}}) {
    SamplingParams sampling;
    TokenHistory history;
    DrawScratch scratch;
    EXPECT_FALSE(Draw({logits, &sampling, &history, {}, {}, 0, 0}, scratch).ok());
  }
}

TEST(DrawTest, AddsBiasesBeforeOtherParameters) {
  SamplingParams greedy;
  greedy.temperature = 0;
  greedy.logit_bias = {{2, 5}, {0, -100}};
  EXPECT_EQ(DrawOne({3, 1, -1}, greedy, 0, 0).token, 2);
  greedy.logprobs = 0;
  const Drawn drawn = DrawOne({0, 0, 0}, greedy, 0, 0);
  EXPECT_NEAR(drawn.logprobs.logprob, -std::log(3.0f), 1e-6)
      << "the log-probabilities of the model are reported";
}

Drawn DrawMasked(const std::vector<float>& logits, uint32_t mask, std::vector<int32_t> banned) {
  SamplingParams greedy;
  greedy.temperature = 0;
  TokenHistory history;
  DrawScratch scratch;
  const std::vector<uint32_t> words = {mask};
  return *Draw({logits, &greedy, &history, banned, words, 0, 0}, scratch);
}

TEST(DrawTest, DrawsOnlyTokensThatTheMaskAllows) {
  EXPECT_EQ(DrawMasked({3, 2, 1}, 0b111, {}).token, 0);
  EXPECT_EQ(DrawMasked({3, 2, 1}, 0b110, {}).token, 1);
  EXPECT_EQ(DrawMasked({3, 2, 1}, 0b110, {1}).token, 2);
  EXPECT_EQ(DrawMasked({3, 2, 1}, 0b010, {1}).token, 1) << "the mask allows no other token";
  EXPECT_EQ(DrawMasked({3, 2, 1}, 0b010, {1, 0, 1}).token, 1);
}

// The probabilities 0.5, 0.2, 0.2, 0.1 have an entropy of 1.76 bits. The information of the tokens is 1, 2.3,
// 2.3 and 3.3 bits.
TEST(DrawTest, TypicalKeepsTokensNearestToTheEntropy) {
  const std::vector<float> logits = {std::log(0.5f), std::log(0.2f), std::log(0.2f), std::log(0.1f)};
  const auto drawn = [&](float typical_p) {
    SamplingParams sampling;
    sampling.typical_p = typical_p;
    std::set<int32_t> seen;
    for (uint64_t position = 0; position < 500; ++position) {
      seen.insert(DrawOne(logits, sampling, 5, position).token);
    }
    return seen;
  };
  EXPECT_EQ(drawn(0.1f), (std::set<int32_t>{1}));
  EXPECT_EQ(drawn(0.3f), (std::set<int32_t>{1, 2}));
  EXPECT_EQ(drawn(0.8f), (std::set<int32_t>{0, 1, 2}));
  EXPECT_EQ(drawn(1), (std::set<int32_t>{0, 1, 2, 3}));
}

// The expected values are computed by hand. Repetition divides positive and multiplies negative logits of all
// tokens of the prompt and output. Frequency and presence count the output only.
TEST(DrawTest, PenaltiesFollowTheirDefinitions) {
  TokenHistory history;
  history.AddPrompt(std::vector<int32_t>{0});
  history.AddOutput(1);
  history.AddOutput(1);
  SamplingParams greedy;
  greedy.temperature = 0;
  greedy.repetition_penalty = 2;
  EXPECT_EQ(DrawOne({4, 4.2f, 2.05f}, greedy, 0, 0, history).token, 1);  // 2, 2.1, 2.05
  EXPECT_EQ(DrawOne({4, 4, 2.05f}, greedy, 0, 0, history).token, 2);     // 2, 2, 2.05
  EXPECT_EQ(DrawOne({-1, -3, -2.5f}, greedy, 0, 0, history).token, 0);   // -2, -6, -2.5
  greedy.repetition_penalty = 1;
  greedy.frequency_penalty = 0.5f;
  EXPECT_EQ(DrawOne({0, 0.9f, -1}, greedy, 0, 0, history).token, 0);  // 0, -0.1
  EXPECT_EQ(DrawOne({0, 1.1f, -1}, greedy, 0, 0, history).token, 1);
  greedy.presence_penalty = 0.2f;
  EXPECT_EQ(DrawOne({0, 1.1f, -1}, greedy, 0, 0, history).token, 0);
}

TEST(DrawTest, ADrawDependsOnSeedAndPositionOnly) {
  const std::vector<float> logits = RandomLogits(1000, 3);
  SamplingParams sampling;
  sampling.top_p = 0.9f;
  std::set<int32_t> seen;
  for (uint64_t position = 0; position < 50; ++position) {
    const int32_t token = DrawOne(logits, sampling, 11, position).token;
    EXPECT_EQ(token, DrawOne(logits, sampling, 11, position).token);
    seen.insert(token);
  }
  EXPECT_GT(seen.size(), 10U);
}

struct Cuts {
  float temperature;
  int top_k;
  float top_p, min_p;
};
void PrintTo(const Cuts& cuts, std::ostream* out) {
  *out << fmt::format("temperature {}, top_k {}, top_p {}, min_p {}", cuts.temperature, cuts.top_k,
                      cuts.top_p, cuts.min_p);
}

class DistributionTest : public testing::TestWithParam<Cuts> {};

// Compares frequencies with the reference distribution. Tokens outside it are never drawn, and Pearson's
// chi-square is within five standard deviations of its mean (mean d, the degrees of freedom; variance 2 d).
TEST_P(DistributionTest, FrequenciesFollowTheDefinition) {
  SamplingParams sampling;
  sampling.temperature = GetParam().temperature;
  sampling.top_k = GetParam().top_k;
  sampling.top_p = GetParam().top_p;
  sampling.min_p = GetParam().min_p;
  const std::vector<float> logits = RandomLogits(200, 5);
  const std::map<int32_t, double> expected = Expected(logits, sampling);
  constexpr int kDraws = 40000;
  std::map<int32_t, int> counts;
  for (int i = 0; i < kDraws; ++i) ++counts[DrawOne(logits, sampling, 99, i).token];
  double chi = 0, rest_expected = 0, rest_count = 0;
  int cells = 0;
  for (const auto& [token, share] : expected) {
    const double mean = share * kDraws;
    if (mean < 10) {  // too rare for the approximation, so that they are pooled
      rest_expected += mean;
      rest_count += counts[token];
    } else {
      chi += (counts[token] - mean) * (counts[token] - mean) / mean;
      ++cells;
    }
  }
  if (rest_expected > 0) {
    chi += (rest_count - rest_expected) * (rest_count - rest_expected) / rest_expected;
    ++cells;
  }
  const double freedom = std::max(1, cells - 1);
  EXPECT_LT(chi, freedom + 5 * std::sqrt(2 * freedom));
  for (const auto& [token, count] : counts) EXPECT_TRUE(count == 0 || expected.contains(token)) << token;
}

INSTANTIATE_TEST_SUITE_P(AllCuts, DistributionTest,
                         testing::Values(Cuts{1, 0, 1, 0}, Cuts{0.7f, 0, 1, 0}, Cuts{1, 10, 1, 0},
                                         Cuts{1, 0, 0.8f, 0}, Cuts{1, 0, 1, 0.1f},
                                         Cuts{1.5f, 40, 0.9f, 0.02f}, Cuts{1, 1, 1, 0}, Cuts{1, 0, 1e-6f, 0},
                                         Cuts{1, 0, 1, 1}));

TEST(LogprobsTest, AreTheLogSoftmaxOfTheUnmodifiedLogits) {
  const std::vector<float> logits = RandomLogits(50, 8);
  SamplingParams sampling;
  sampling.temperature = 0.3f;
  sampling.top_k = 2;
  sampling.logprobs = 4;
  const Drawn drawn = DrawOne(logits, sampling, 1, 2);
  double sum = 0;
  for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
  EXPECT_NEAR(drawn.logprobs.logprob, logits[drawn.token] - std::log(sum), 1e-5);
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  ASSERT_EQ(drawn.logprobs.top.size(), 4U);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(drawn.logprobs.top[i].token, order[i]);
    EXPECT_NEAR(drawn.logprobs.top[i].logprob, logits[order[i]] - std::log(sum), 1e-5);
  }
}

TEST(CheckSamplingTest, NamesParametersOutOfRange) {
  const auto fault = [](auto change) {
    SamplingParams sampling;
    change(sampling);
    return Message(CheckSampling(sampling, 100));
  };
  EXPECT_EQ(fault([](SamplingParams&) {}), "");
  EXPECT_EQ(fault([](SamplingParams& s) { s.temperature = -1; }),
            "temperature must be in [0, 100], found -1");
  EXPECT_EQ(fault([](SamplingParams& s) { s.temperature = NAN; }),
            "temperature must be in [0, 100], found nan");
  EXPECT_EQ(fault([](SamplingParams& s) { s.top_p = 0; }), "top_p must be in (0, 1], found 0");
  EXPECT_EQ(fault([](SamplingParams& s) { s.typical_p = 0; }), "typical_p must be in (0, 1], found 0");
  EXPECT_EQ(fault([](SamplingParams& s) {
              s.logit_bias = {{3, 101}};
            }),
            "logit_bias must be in [-100, 100], found 101");
  EXPECT_EQ(fault([](SamplingParams& s) {
              s.logit_bias = {{100, 1}};
            }),
            "logit_bias names a token outside [0, 100): 100");
  EXPECT_EQ(fault([](SamplingParams& s) { s.top_k = -3; }), "top_k must be 0 (off) or more, found -3");
  EXPECT_EQ(fault([](SamplingParams& s) { s.min_tokens = 17; }),
            "min_tokens must be in [0, max_tokens = 16], found 17");
  EXPECT_EQ(fault([](SamplingParams& s) { s.stop_ids = {100}; }), "stop id outside [0, 100): 100");
  EXPECT_EQ(fault([](SamplingParams& s) { s.logprobs = 101; }),
            "logprobs must be -1 (none) or in [0, 100], found 101");
}

}  // namespace
}  // namespace moesaic::engine
