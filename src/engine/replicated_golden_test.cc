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

INSTANTIATE_TEST_SUITE_P(
    All, ReplicatedGoldenTest,
    testing::Values(Case{"deepseek-v3-mtp", {.data = 2}}, Case{"deepseek-v3-mtp", {.tensor = 2, .data = 2}},
                    Case{"deepseek-v3-mtp", {.pipeline = 2, .data = 2}},
                    Case{"qwen3-moe-norm-tied", {.tensor = 2, .data = 2}},
                    Case{"qwen3-moe-norm-tied", {.data = 3}},
                    Case{"qwen3-moe-norm-tied", {.tensor = 2, .pipeline = 2, .data = 2}}),
    NameOf);

}  // namespace
}  // namespace moesaic::engine
