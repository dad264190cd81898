// Engines of data parallel replicas, whose ranks are threads here. Outputs are those of the oracle.
#include "engine/ranked_engine.h"

namespace moesaic::engine {
namespace {

class ReplicatedGoldenTest : public testing::TestWithParam<Case> {};

TEST_P(ReplicatedGoldenTest, OutputsAreTheOraclesUnderEveryLoad) {
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

// One request at a time, so that the other replicas are idle, and some that end early.
TEST_P(ReplicatedGoldenTest, IdleReplicasDoNotHoldOthersUp) {
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

INSTANTIATE_TEST_SUITE_P(All, ReplicatedGoldenTest,
                         testing::Values(Case{"deepseek-v3-mtp", {.data = 2}},
                                         Case{"deepseek-v3-mtp", {.tensor = 2, .data = 2}},
                                         Case{"deepseek-v3-mtp", {.pipeline = 2, .data = 2}},
                                         Case{"qwen3-moe-norm-tied", {.tensor = 2, .data = 2}},
                                         Case{"qwen3-moe-norm-tied", {.data = 3}},
                                         Case{"deepseek-v3-mtp", {.data = 2, .expert = 2}},
                                         Case{"deepseek-v3-mtp", {.tensor = 2, .data = 2, .expert = 4}},
                                         Case{"deepseek-v3-mtp", {.pipeline = 2, .data = 2, .expert = 2}},
                                         Case{"qwen3-moe-norm-tied", {.data = 3, .expert = 3}}),
                         NameOf);

}  // namespace
}  // namespace moesaic::engine
