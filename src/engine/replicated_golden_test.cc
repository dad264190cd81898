// Engines of data parallel replicas, whose ranks are threads here. Outputs are those of the oracle.
#include "engine/ranked_engine.h"

namespace moesaic::engine {
namespace {

class ReplicatedGoldenTest : public testing::TestWithParam<Case> {
 protected:
  std::string checkpoint() const { return GetParam().checkpoint; }
};

TEST_P(ReplicatedGoldenTest, OutputsAreTheOraclesUnderEveryLoad) {
  struct Load {
    int blocks, batch_tokens, swap_blocks = 0, warm_blocks = 0;
  };
  for (const Load& load : {Load{64, 512}, {64, 13}, {14, 50, 14}, {20, 512, 0, 20}}) {
    RankedEngine ranks(checkpoint(), GetParam().degrees);
    EngineOptions options;
    options.max_sequences = 8;
    options.max_batch_tokens = load.batch_tokens;
    options.warm_exact = true;
    const Status started = ranks.Start(options, load.blocks, load.swap_blocks, load.warm_blocks);
    ASSERT_TRUE(started.ok()) << Message(started);
    ExpectOracle(ranks.engine(), checkpoint());
    ExpectOracle(ranks.engine(), checkpoint());  // prompts are in the prefix caches now
    const EngineStats stats = ranks.engine().stats();
    EXPECT_GT(stats.cache_hits, 0);
    ASSERT_EQ(std::ssize(stats.replicas), GetParam().degrees.data);
    for (const ReplicaStats& replica : stats.replicas) EXPECT_GT(replica.output_tokens, 0);
    ASSERT_EQ(std::ssize(stats.ranks), GetParam().degrees.ranks());
    for (const RankStats& rank : stats.ranks) EXPECT_GT(rank.step_seconds, 0) << "rank " << rank.rank;
    for (const Status& ended : ranks.End()) EXPECT_TRUE(ended.ok()) << Message(ended);
  }
}

TEST_P(ReplicatedGoldenTest, DraftsKeepOutputs) {
  for (const char* method : {"ngram", "mtp"}) {
    if (std::string(method) == "mtp" && checkpoint().find("mtp") == std::string::npos) continue;
    RankedEngine ranks(checkpoint(), GetParam().degrees);
    EngineOptions options;
    options.max_sequences = 8;
    options.max_batch_tokens = 64;
    options.speculative.method = method;
    const Status started = ranks.Start(options, 64);
    ASSERT_TRUE(started.ok()) << Message(started);
    ExpectOracle(ranks.engine(), checkpoint());
    EXPECT_GT(ranks.engine().stats().speculation.draft_tokens, 0) << method;
  }
}

INSTANTIATE_TEST_SUITE_P(All, ReplicatedGoldenTest,
                         testing::Values(Case{"deepseek-v3-mtp", {.data = 2}},
                                         Case{"deepseek-v3-mtp", {.tensor = 2, .data = 2}},
                                         Case{"deepseek-v3-mtp", {.pipeline = 2, .data = 2}},
                                         Case{"qwen3-moe-norm-tied", {.tensor = 2, .data = 2}},
                                         Case{"qwen3-moe-norm-tied", {.data = 3}}),
                         NameOf);

}  // namespace
}  // namespace moesaic::engine
