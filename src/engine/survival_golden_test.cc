// Replicas that divide the experts continue without ranks that die. Ranks are threads here.
#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <random>

#include "engine/ranked_engine.h"

namespace moesaic::engine {
namespace {

using testing::HasSubstr;

struct SurvivalCase {
  const char* checkpoint;
  int layers;   // decoder layers
  int experts;  // routed, of a layer
  int ranks;
  const char* speculative = "off";
};

void PrintTo(const SurvivalCase& c, std::ostream* out) {
  *out << c.checkpoint << " on " << c.ranks << " ranks, speculative " << c.speculative;
}

parallel::Degrees DegreesOf(const SurvivalCase& c) { return {.data = c.ranks, .expert = c.ranks}; }

// Each expert is on two ranks: those of rank r are on rank r + 1, too.
parallel::Placement Doubled(const SurvivalCase& c) {
  parallel::LayerPlacement layer(c.ranks);
  for (int expert = 0; expert < c.experts; ++expert) {
    const int rank = expert * c.ranks / c.experts;
    layer[rank].push_back(expert);
    layer[(rank + 1) % c.ranks].push_back(expert);
  }
  for (std::vector<int>& experts : layer) std::ranges::sort(experts);
  return {.experts = c.experts, .layers = std::vector<parallel::LayerPlacement>(c.layers, layer)};
}

struct Answer {
  std::vector<float> tokens;  // and their log-probabilities
  FinishReason finish = FinishReason::kNone;
  Status status;
};

// Answers of a wave of requests, two for each rank, in the order in which they are added.
std::vector<Answer> RunWave(Engine& engine, int wave, int requests) {
  std::map<RequestId, Answer> answers;
  for (int i = 0; i < requests; ++i) {
    Request request;
    for (int t = 0; t < 9 + i; ++t) request.prompt.push_back(3 + (wave * 11 + i * 5 + t * 3) % 120);
    request.sampling.temperature = 0;
    request.sampling.max_tokens = 7;
    request.sampling.ignore_eos = true;
    request.sampling.logprobs = 1;
    const StatusOr<RequestId> id = engine.Add(request);
    EXPECT_TRUE(id.ok()) << Message(id.status());
    answers[*id] = {};
  }
  while (!engine.idle()) {
    std::vector<TokenEvent> events;
    const Status status = engine.Step(&events);
    EXPECT_TRUE(status.ok()) << Message(status);
    if (!status.ok()) return {};
    for (TokenEvent& event : events) {
      Answer& answer = answers[event.request];
      if (event.token.has_value()) {
        answer.tokens.push_back(static_cast<float>(*event.token));
        answer.tokens.push_back(event.logprobs.logprob);
      }
      EXPECT_EQ(answer.finish, FinishReason::kNone) << "one end for each request";
      answer.finish = event.finish;
      answer.status = event.status;
    }
  }
  std::vector<Answer> ordered;
  for (auto& [id, answer] : answers) ordered.push_back(std::move(answer));
  return ordered;
}

// MLA rounds differently where a repeated step has other chunks (S12); grouped-query attention does not.
void ExpectSame(const std::vector<float>& tokens, const std::vector<float>& expected, const SurvivalCase& c) {
  if (std::string_view(c.checkpoint).starts_with("qwen3")) {
    EXPECT_EQ(tokens, expected);
    return;
  }
  ASSERT_EQ(tokens.size(), expected.size());
  for (size_t i = 0; i < tokens.size(); ++i) EXPECT_NEAR(tokens[i], expected[i], 1e-4) << i;
}

constexpr int kWaves = 3;

class SurvivalGoldenTest : public testing::TestWithParam<SurvivalCase> {
 protected:
  static EngineOptions Options() {
    EngineOptions options{.max_sequences = 4, .max_batch_tokens = 16};
    options.speculative.method = GetParam().speculative;
    return options;
  }
  static std::vector<std::vector<Answer>> Waves(RankedEngine& ranks) {
    std::vector<std::vector<Answer>> waves;
    for (int wave = 0; wave < kWaves; ++wave) {
      waves.push_back(RunWave(ranks.engine(), wave, 2 * GetParam().ranks));
    }
    return waves;
  }
  static void ExpectLivingRanksEndWell(RankedEngine& ranks, const std::vector<int>& dead) {
    const std::vector<Status>& ended = ranks.End();
    for (size_t rank = 0; rank < ended.size(); ++rank) {
      const bool died = std::ranges::find(dead, static_cast<int>(rank)) != dead.end();
      EXPECT_EQ(ended[rank].ok(), !died) << "rank " << rank << ": " << Message(ended[rank]);
    }
  }
};

// The victim dies at a random message. Requests of the other replicas get the same answers as without a
// death.
TEST_P(SurvivalGoldenTest, AnswersOfOtherReplicasStayTheSameIfAllExpertsHaveReplicas) {
  const SurvivalCase& c = GetParam();
  RankedEngine whole(c.checkpoint, DegreesOf(c), {.placement = Doubled(c)});
  ASSERT_TRUE(whole.Start(Options(), 24).ok());
  const std::vector<std::vector<Answer>> expected = Waves(whole);
  std::mt19937 random(7);
  int deaths = 0, failed = 0;
  for (int trial = 0; trial < 9; ++trial) {
    const int victim = 1 + trial % (c.ranks - 1);
    const auto send = static_cast<int64_t>(10 + random() % 200);
    SCOPED_TRACE(fmt::format("rank {} dies at message {}", victim, send));
    RankedEngine ranks(
        c.checkpoint, DegreesOf(c),
        {.dies_at_send = send, .victim = victim, .tolerates_failures = true, .placement = Doubled(c)});
    ASSERT_TRUE(ranks.Start(Options(), 24).ok());
    const std::vector<std::vector<Answer>> waves = Waves(ranks);
    int errors = 0;
    for (int wave = 0; wave < kWaves; ++wave) {
      ASSERT_EQ(waves[wave].size(), expected[wave].size());
      for (size_t i = 0; i < waves[wave].size(); ++i) {
        const Answer& answer = waves[wave][i];
        if (answer.finish == FinishReason::kError) {
          ++errors;
          EXPECT_THAT(Message(answer.status), HasSubstr(fmt::format("rank {} died", victim)));
          continue;
        }
        EXPECT_EQ(answer.finish, FinishReason::kLength);
        SCOPED_TRACE(fmt::format("wave {}, request {}", wave, i));
        ExpectSame(answer.tokens, expected[wave][i].tokens, c);
      }
    }
    const EngineStats stats = ranks.engine().stats();
    ASSERT_NE(stats.survival, nullptr);
    EXPECT_LE(errors, 2) << "only requests of the dead replica fail";
    EXPECT_EQ(stats.survival->failed_requests, errors);
    const bool died = stats.survival->alive < c.ranks;
    const bool has_mtp = std::string_view(c.speculative) == "mtp";  // whose experts have no replicas
    EXPECT_EQ(stats.survival->left_out_experts > 0, has_mtp && died);
    deaths += died ? 1 : 0;
    failed += errors;
    ExpectLivingRanksEndWell(ranks, died ? std::vector<int>{victim} : std::vector<int>{});
  }
  EXPECT_GE(deaths, 5);
  EXPECT_GT(failed, 0);
}

// Logits of all rows, in a layout of several ranks those of rank 0.
std::vector<float> ScoreOf(Engine& engine) {
  std::vector<int32_t> ids;
  for (int i = 0; i < 40; ++i) ids.push_back(3 + i * 7 % 90);
  std::vector<float> logits;
  const Status scored = engine.Score(ids, [&](int64_t, std::span<const float> rows) {
    logits.insert(logits.end(), rows.begin(), rows.end());
    return OkStatus();
  });
  EXPECT_TRUE(scored.ok()) << Message(scored);
  return logits;
}

TEST_P(SurvivalGoldenTest, ExpertsWithoutReplicasAreLeftOutAsInOneProcess) {
  const SurvivalCase& c = GetParam();
  for (int first = 1; first < c.ranks; ++first) {
    RankedEngine ranks(c.checkpoint, DegreesOf(c), {.tolerates_failures = true});
    ASSERT_TRUE(ranks.Start(Options(), 24).ok());
    RankedEngine one(c.checkpoint, {});
    ASSERT_TRUE(one.Start(Options(), 64).ok());
    std::vector<int> dead;
    // Ranks die one after the other, until only the driver is left.
    for (int i = 0; i + 1 < c.ranks; ++i) {
      dead.push_back(1 + (first - 1 + i) % (c.ranks - 1));
      ranks.job().Kill(dead.back());
      if (i % 2 == 1) {  // an idle engine finds it
        EXPECT_TRUE(ranks.engine().CheckRanks().ok());
      }
      const std::vector<float> scores = ScoreOf(ranks.engine());
      for (const models::LeftOutExperts& left_out : ranks.model().left_out_experts()) {
        ASSERT_TRUE(one.model().LeaveOutExperts(left_out).ok());
      }
      const std::vector<float> expected = ScoreOf(one.engine());
      ASSERT_EQ(scores.size(), expected.size());
      for (size_t at = 0; at < scores.size(); ++at) ASSERT_NEAR(scores[at], expected[at], 1e-4);
      const std::vector<Answer> answers = RunWave(ranks.engine(), i, 4);
      ASSERT_EQ(answers.size(), 4U);
      for (const Answer& answer : answers) {
        EXPECT_EQ(answer.finish, FinishReason::kLength) << Message(answer.status);
      }
      const EngineStats stats = ranks.engine().stats();
      ASSERT_NE(stats.survival, nullptr);
      EXPECT_EQ(stats.survival->alive, c.ranks - 1 - i);
      EXPECT_GT(stats.survival->left_out_experts, 0);
      EXPECT_GE(stats.survival->reduced_requests, 4 * (i + 1));
      EXPECT_EQ(stats.survival->failed_requests, 0);
      EXPECT_EQ(std::ssize(stats.survival->failures), i + 1);
    }
    ExpectLivingRanksEndWell(ranks, dead);
  }
}

INSTANTIATE_TEST_SUITE_P(All, SurvivalGoldenTest,
                         testing::Values(SurvivalCase{"qwen3-moe-norm-tied", 4, 8, 4},
                                         SurvivalCase{"qwen3-moe-nonorm-untied", 3, 8, 3},
                                         SurvivalCase{"deepseek-v3-noqlora", 3, 16, 3},
                                         SurvivalCase{"deepseek-v3-mtp", 2, 8, 3, "mtp"}),
                         [](const auto& info) { return models::TestName(info.param.checkpoint); });

}  // namespace
}  // namespace moesaic::engine
