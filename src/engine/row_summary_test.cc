// Draws from summaries of rows equal those from the rows' logits, or ask for the logits.
#include "engine/row_summary.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>

#include "engine/sampling.h"

namespace moesaic::engine {
namespace {

using parallel::Range;

RowSummary Summarize(const std::vector<float>& logits, int slices, int count, const RowNeeds& needs) {
  std::vector<TokenLogit> best;
  std::vector<int> counts;
  std::vector<SliceSums> sums;
  const std::vector<Range> columns = parallel::Divide(static_cast<int>(logits.size()), 1, slices);
  for (const Range& range : columns) {
    const size_t before = best.size();
    sums.push_back(SummarizeSlice(std::span(logits).subspan(range.first, range.count), range.first, count,
                                  needs, &best));
    counts.push_back(static_cast<int>(best.size() - before));
  }
  return MergeSlices(std::move(best), counts, columns, std::move(sums));
}

SamplingParams Params(float temperature, int top_k = 0, float top_p = 1, int logprobs = -1) {
  SamplingParams params;
  params.temperature = temperature;
  params.top_k = top_k;
  params.top_p = top_p;
  params.logprobs = logprobs;
  return params;
}

// A random row, random parameters, and a summary of the row.
class Case {
 public:
  explicit Case(uint32_t seed) : random_(seed) {
    const int vocab = Number(1, 400);
    logits_.resize(vocab);
    // Some rows have many ties, others one likely token.
    const float step = Flip() ? 0.5F : 1e-4F, width = Flip() ? 1.0F : 6.0F;
    std::normal_distribution<float> normal(0, width);
    for (float& logit : logits_) logit = std::round(normal(random_) / step) * step;
    if (Number(0, 30) == 0) logits_[Number(0, vocab - 1)] = std::numeric_limits<float>::quiet_NaN();
    if (Number(0, 30) == 0) std::fill(logits_.begin(), logits_.end(), -INFINITY);
    if (Number(0, 30) == 0) logits_[Number(0, vocab - 1)] = INFINITY;
    for (int i = Number(0, 3); i > 0; --i) logits_[Number(0, vocab - 1)] = -INFINITY;
    sampling_.temperature = Flip() ? 0.0F : Flip() ? 1.0F : Real(0.05F, 3);
    if (Flip()) sampling_.top_k = Number(0, 80);
    if (Flip()) sampling_.top_p = Real(0.1F, 1);
    if (Number(0, 3) == 0) sampling_.min_p = Real(0, 0.3F);
    if (Number(0, 3) == 0) sampling_.typical_p = Real(0.1F, 1);
    if (Flip()) sampling_.logprobs = Number(0, std::min(20, vocab));
    if (Number(0, 3) == 0) Change(vocab);
    RowNeeds needs = NeedsOf(sampling_);
    if (Number(0, 9) == 0) needs = {};  // sums that are missing are no other sums
    summary_ = Summarize(logits_, Number(1, std::min(vocab, 5)), Number(1, 70), needs);
    position_ = random_();
  }

  StatusOr<Drawn> DrawWith(bool logits) {
    DrawScratch scratch;
    return Draw({.logits = logits ? std::span<const float>(logits_) : std::span<const float>(),
                 .sampling = &sampling_,
                 .history = &history_,
                 .banned = banned_,
                 .mask = mask_,
                 .seed = 7,
                 .position = position_,
                 .summary = &summary_},
                scratch);
  }
  const RowSummary& summary() const { return summary_; }
  const std::vector<float>& logits() const { return logits_; }
  const SamplingParams& sampling() const { return sampling_; }

 private:
  bool Flip() { return Number(0, 1) == 1; }
  int Number(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  float Real(float low, float high) { return std::uniform_real_distribution<float>(low, high)(random_); }

  // Biases, bans, a mask and penalties.
  void Change(int vocab) {
    for (int i = Number(0, 3); i > 0; --i)
      sampling_.logit_bias.emplace_back(Number(0, vocab - 1), Real(-3, 2));
    for (int i = Number(0, 2); i > 0; --i) banned_.push_back(Number(0, vocab - 1));
    if (Flip()) {
      mask_.resize((vocab + 31) / 32);
      for (uint32_t& word : mask_) word = random_() & random_();
    }
    if (Flip()) {
      sampling_.repetition_penalty = Real(0.8F, 1.5F);
      sampling_.presence_penalty = Real(-0.5F, 1);
      for (int i = 0; i < 10; ++i) history_.AddOutput(Number(0, vocab - 1));
    }
  }

  std::mt19937 random_;
  std::vector<float> logits_;
  SamplingParams sampling_;
  TokenHistory history_;
  std::vector<int32_t> banned_;
  std::vector<uint32_t> mask_;
  uint64_t position_ = 0;
  RowSummary summary_;
};

TEST(RowSummaryTest, DrawsEqualThoseFromAllLogits) {
  constexpr int kCases = 20'000;
  int decided = 0;
  for (int seed = 0; seed < kCases; ++seed) {
    Case row(seed);
    const StatusOr<Drawn> whole = row.DrawWith(/*logits=*/true), part = row.DrawWith(/*logits=*/false);
    if (part.ok() && part->needs_logits) continue;
    ++decided;
    ASSERT_EQ(part.ok(), whole.ok()) << seed << ": " << Message(whole.status());
    if (!part.ok()) continue;
    ASSERT_EQ(part->token, whole->token) << seed;
    ASSERT_EQ(part->logprobs.logprob, whole->logprobs.logprob) << seed;  // bit for bit
    ASSERT_EQ(part->logprobs.top.size(), whole->logprobs.top.size()) << seed;
    for (size_t i = 0; i < part->logprobs.top.size(); ++i) {
      ASSERT_EQ(part->logprobs.top[i].token, whole->logprobs.top[i].token) << seed;
      ASSERT_EQ(part->logprobs.top[i].logprob, whole->logprobs.top[i].logprob) << seed;
    }
  }
  EXPECT_GT(decided, kCases / 2);
}

TEST(RowSummaryTest, CandidatesAreTheFirstTokensOfTheWholeRow) {
  for (int seed = 0; seed < 2000; ++seed) {
    const Case row(seed);
    const RowSummary& summary = row.summary();
    ASSERT_EQ(summary.vocab_size, std::ssize(row.logits()));
    ASSERT_EQ(summary.has_nan(), std::ranges::any_of(row.logits(), [](float x) { return std::isnan(x); }));
    if (summary.has_nan()) continue;
    std::vector<TokenLogit> all;
    for (const float logit : row.logits()) all.push_back({static_cast<int32_t>(all.size()), logit});
    std::sort(all.begin(), all.end(), ComesBefore);
    ASSERT_FALSE(summary.best.empty());
    for (size_t i = 0; i < summary.best.size(); ++i) ASSERT_EQ(summary.best[i].token, all[i].token) << seed;
    ASSERT_EQ(LikeliestToken(summary), LikeliestToken(row.logits())) << seed;
  }
}

// Requests as clients send them need no logits: the row has the shape of a language model's.
TEST(RowSummaryTest, UsualRequestsAreDecidedByCandidates) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 2);
  std::vector<float> logits(50'000);
  for (float& logit : logits) logit = normal(random);
  for (int i = 0; i < 30; ++i) logits[random() % logits.size()] = 18.0F - 0.5F * static_cast<float>(i);
  struct Usual {
    SamplingParams sampling;
    int most_fetched;  // of 200 draws
  };
  SamplingParams min_p = Params(1);
  min_p.min_p = 0.05F;
  const Usual usual[] = {{Params(0, 0, 1, 20), 0},
                         {Params(0.7F, 40, 0.9F), 0},
                         {Params(0.6F, 0, 0.95F, 5), 0},
                         {Params(0.6F, 20, 0.95F), 0},
                         {min_p, 0},
                         {Params(1), 20}};  // the draw may fall on any token
  for (const Usual& request : usual) {
    const RowSummary summary = Summarize(logits, 2, kRowCandidates, NeedsOf(request.sampling));
    int fetched = 0;
    for (uint64_t position = 0; position < 200; ++position) {
      DrawScratch scratch;
      const TokenHistory history;
      const StatusOr<Drawn> drawn = Draw({.logits = {},
                                          .sampling = &request.sampling,
                                          .history = &history,
                                          .banned = {},
                                          .seed = 1,
                                          .position = position,
                                          .summary = &summary},
                                         scratch);
      ASSERT_TRUE(drawn.ok());
      fetched += drawn->needs_logits;
    }
    EXPECT_LE(fetched, request.most_fetched) << "temperature " << request.sampling.temperature;
  }
}

TEST(RowSummaryTest, SumsOfSlicesAreThoseOfTheRow) {
  std::vector<float> logits(1000);
  std::iota(logits.begin(), logits.end(), -900.0F);
  const RowSummary summary = Summarize(logits, 3, 8, {.temperature = 0.5F, .normalizer = true});
  // Geometric series with ratios exp(-1) and exp(-2).
  EXPECT_NEAR(summary.LogNormalizer(), 99 - std::log1p(-std::exp(-1.0)), 1e-6);
  EXPECT_NEAR(summary.WeightSum(0.5F), 1 / (1 - std::exp(-2.0)), 1e-6);
}

}  // namespace
}  // namespace moesaic::engine
