// Engines of data parallel replicas, whose ranks are threads here. Outputs are those of the oracle.
#include "engine/ranked_engine.h"

namespace moesaic::engine {
namespace {

class ReplicatedGoldenTest : public testing::TestWithParam<Case> {};

TEST_P(ReplicatedGoldenTest, OutputsEqualThoseOfTheOracleUnderEveryLoad) {
  for (const Load& load : {Load{64, 512}, {64, 13}, {14, 50, 14}, {20, 512, 0, 20}}) {
    ExpectOracleUnder(load, GetParam(), [](const EngineStats& stats) {
      ASSERT_EQ(std::ssize(stats.replicas), GetParam().degrees.data);
      for (const ReplicaStats& replica : stats.replicas) EXPECT_GT(replica.output_tokens, 0);
      ASSERT_EQ(std::ssize(stats.ranks), GetParam().degrees.ranks());
      for (const RankStats& rank : stats.ranks) EXPECT_GT(rank.step_seconds, 0) << "rank " << rank.rank;
    });
  }
}

TEST_P(ReplicatedGoldenTest, DraftsKeepOutputs) { ExpectOracleWithDrafts(GetParam()); }

TEST_P(ReplicatedGoldenTest, OutputsFollowTheirGrammars) { ExpectGrammars(GetParam()); }

TEST_P(ReplicatedGoldenTest, AbortsFreeBlocksOnAllReplicas) { ExpectAbortsFreeBlocks(GetParam()); }

// One request at a time, so that the other replicas are idle, and some that end early.
TEST_P(ReplicatedGoldenTest, IdleReplicasDoNotDelayOthers) {
  RankedEngine ranks(GetParam().checkpoint, GetParam().degrees);
  ASSERT_TRUE(ranks.Start({.max_sequences = 8, .max_batch_tokens = 64}, 64).ok());
  std::vector<std::vector<int32_t>> outputs;
  for (int round = 0; round < 6; ++round) {
    Request request;
    request.prompt = {5, 6, 7, 8, 9, 10, 11};
    request.sampling.temperature = 0;
    request.sampling.max_tokens = 12;
    const RequestId id = *ranks.engine().Add(request);
    std::vector<int32_t>& said = outputs.emplace_back();
    for (int step = 0; !ranks.engine().idle(); ++step) {
      std::vector<TokenEvent> events;
      const Status status = ranks.engine().Step(&events);
      ASSERT_TRUE(status.ok()) << Message(status);
      for (const TokenEvent& event : events) {
        if (event.token.has_value()) said.push_back(*event.token);
      }
      if (round % 2 == 1 && step == 3) ranks.engine().Cancel(id);
    }
  }
  EXPECT_EQ(outputs[0].size(), 12U);
  EXPECT_EQ(outputs[2], outputs[0]);
  EXPECT_LT(outputs[1].size(), 12U);
  for (const Status& ended : ranks.End()) EXPECT_TRUE(ended.ok()) << Message(ended);
}

// Tokens and their log-probabilities of prompts that come one after the other.
std::vector<float> OutputsOf(const Case& c, const RankedEngineOptions& layout, const EngineOptions& options,
                             EngineStats* stats) {
  RankedEngine ranks(c.checkpoint, c.degrees, layout);
  const Status started = ranks.Start(options, 64);
  EXPECT_TRUE(started.ok()) << Message(started);
  std::map<RequestId, std::vector<float>> said;
  for (int round = 0; round < 24; ++round) {
    for (int i = 0; i < 3; ++i) {
      Request request;
      for (int t = 0; t < 20; ++t) request.prompt.push_back(3 + (round * 7 + i * 5 + t * 3) % 60);
      request.sampling.temperature = 0;
      request.sampling.max_tokens = 6;
      request.sampling.logprobs = 1;
      EXPECT_TRUE(ranks.engine().Add(request).ok());
    }
    while (!ranks.engine().idle()) {
      std::vector<TokenEvent> events;
      const Status status = ranks.engine().Step(&events);
      EXPECT_TRUE(status.ok()) << Message(status);
      if (!status.ok()) return {};
      for (const TokenEvent& event : events) {
        if (!event.token.has_value()) continue;
        said[event.request].push_back(static_cast<float>(*event.token));
        said[event.request].push_back(event.logprobs.logprob);
      }
    }
  }
  *stats = ranks.engine().stats();
  for (const Status& ended : ranks.End()) EXPECT_TRUE(ended.ok()) << Message(ended);
  std::vector<float> all;
  for (const auto& [id, values] : said) all.insert(all.end(), values.begin(), values.end());
  return all;
}

class MovingExpertsTest : public testing::TestWithParam<Case> {};

TEST_P(MovingExpertsTest, OutputsAreBitwiseThoseOfExpertsThatStay) {
  EngineStats stayed, moved;
  const EngineOptions options{.max_sequences = 8, .max_batch_tokens = 64};
  const RankedEngineOptions layout = {.experts_move = true};
  const std::vector<float> expected = OutputsOf(GetParam(), layout, options, &stayed);
  ASSERT_EQ(OutputsOf(GetParam(), layout, MovingOptions(options), &moved), expected);
  EXPECT_EQ(stayed.balance, nullptr);
  ASSERT_NE(moved.balance, nullptr);
  EXPECT_GT(moved.balance->moved_layers, 0);
  EXPECT_GT(moved.balance->moved_experts, 0);
  EXPECT_EQ(moved.balance->rolled_back, 0);
  EXPECT_EQ(moved.balance->failed_plans, 0);
}

// Experts as they are stored: int8 with scales of activations that are computed, and groups of int4.
TEST(MovingQuantizedExpertsTest, OutputsAreBitwiseThoseOfExpertsThatStay) {
  for (const char* checkpoint : {"ct-qwen3-moe-int8-dynamic", "ct-qwen3-moe-int4-experts"}) {
    const Case c = {checkpoint, {.data = 2, .expert = 2}};
    const EngineOptions options{.max_sequences = 8, .max_batch_tokens = 64};
    const RankedEngineOptions layout = {.experts_move = true, .dtype = "auto"};
    EngineStats stayed, moved;
    const std::vector<float> expected = OutputsOf(c, layout, options, &stayed);
    EXPECT_FALSE(expected.empty());
    ASSERT_EQ(OutputsOf(c, layout, MovingOptions(options), &moved), expected) << checkpoint;
    ASSERT_NE(moved.balance, nullptr);
    EXPECT_GT(moved.balance->moved_experts, 0) << checkpoint;
    EXPECT_EQ(moved.balance->rolled_back, 0) << checkpoint;
  }
}

// Weights travel at no cost, so that every batch sends experts of rank 0 as soon as the time of a row has
// been measured.
TEST_P(MovingExpertsTest, OutputsAreBitwiseThoseOfExpertsThatAreNotSpilled) {
  const parallel::Degrees& degrees = GetParam().degrees;
  const models::ModelInfo info = RankedEngine(GetParam().checkpoint, {}).info();
  RankedEngineOptions layout = {.experts_move = true};
  parallel::LayerPlacement layer(degrees.tensor * degrees.data);
  for (int expert = 0; expert < info.experts; ++expert) {
    const auto other = static_cast<size_t>(info.experts - expert);  // each other rank has one expert
    layer[other < layer.size() ? other : 0].push_back(expert);
  }
  layout.placement = {.experts = info.experts,
                      .layers = std::vector<parallel::LayerPlacement>(info.layers, layer)};
  const EngineOptions options{.max_sequences = 8, .max_batch_tokens = 64};
  const auto spilled = [](const EngineStats& stats) {
    int64_t experts = 0;
    for (const RankStats& rank : stats.ranks) experts += rank.spilled_experts + rank.prefetched_experts;
    return experts;
  };
  EngineStats stats;
  const std::vector<float> expected = OutputsOf(GetParam(), layout, options, &stats);
  EXPECT_EQ(spilled(stats), 0);
  layout.split = {
      .least_tokens = 1, .spill_bytes = int64_t{1} << 30, .spill_tolerance = 0, .spill_bytes_per_s = 1e30};
  // A layer with experts follows another one, and its weights are prefetched.
  const bool prefetches = info.moe_layers > degrees.pipeline;
  // Experts go to a rank only if it has measured no slower rows, which a busy machine may prevent for a
  // while.
  int64_t all = 0, used = 0;
  for (int run = 0; run < 100 && (all <= 100 || (prefetches && used <= 10)); ++run) {
    ASSERT_EQ(OutputsOf(GetParam(), layout, options, &stats), expected);
    all += spilled(stats);
    for (const RankStats& rank : stats.ranks) used += rank.used_prefetched_experts;
  }
  EXPECT_GT(all, 100);
  EXPECT_EQ(used > 10, prefetches);
}

INSTANTIATE_TEST_SUITE_P(All, MovingExpertsTest,
                         testing::Values(Case{"qwen3-moe-norm-tied", {.data = 2, .expert = 2}},
                                         Case{"deepseek-v3-mtp", {.tensor = 2, .data = 2, .expert = 4}},
                                         Case{"deepseek-v3-mtp", {.pipeline = 2, .data = 2, .expert = 2}}),
                         NameOf);

INSTANTIATE_TEST_SUITE_P(
    All, ReplicatedGoldenTest,
    testing::Values(Case{"deepseek-v3-mtp", {.data = 2}}, Case{"deepseek-v3-mtp", {.tensor = 2, .data = 2}},
                    Case{"deepseek-v3-mtp", {.pipeline = 2, .data = 2}},
                    Case{"qwen3-moe-norm-tied", {.tensor = 2, .data = 2}},
                    Case{"qwen3-moe-norm-tied", {.data = 3}},
                    Case{"deepseek-v3-mtp", {.data = 2, .expert = 2}},
                    Case{"deepseek-v3-mtp", {.tensor = 2, .data = 2, .expert = 4}},
                    Case{"deepseek-v3-mtp", {.pipeline = 2, .data = 2, .expert = 2}},
                    Case{"qwen3-moe-norm-tied", {.data = 3, .expert = 3}},
                    Case{"qwen3-moe-norm-tied", {.tensor = 2, .pipeline = 2, .data = 2, .expert = 4}},
                    Case{"kimi-k2", {.data = 4, .expert = 4}},
                    Case{"pangu-ultra-moe-v11", {.tensor = 2, .data = 2, .expert = 4}},
                    Case{"llama3-rope-bias", {.tensor = 2, .data = 2}}),
    NameOf);

}  // namespace
}  // namespace moesaic::engine
