// Attention over chosen blocks on several ranks, which are threads here: docs/contracts/sparsity.md.
#include <vector>

#include "engine/ranked_engine.h"
#include "engine/test_sparsity.h"

namespace moesaic::engine {
namespace {

using parallel::Degrees;

struct SparseRun {
  SparseOutput said;
  EngineStats stats;
};

class RankedSparsityTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    info_ = RankedEngine(GetParam().checkpoint, {}).info();
    prompts_ = SparsePrompts(info_.vocab_size);
  }

  // True if ranks share the query heads of a KV head.
  bool SharesKvHeads() const {
    const int tensor = GetParam().degrees.tensor;
    return tensor > 1 && (info_.kv.shared || tensor > info_.kv.heads);
  }

  static EngineOptions Options(int budget, SparsityMode mode = SparsityMode::kAll) {
    EngineOptions options;
    options.max_sequences = 8;
    options.max_batch_tokens = 512;
    options.sparsity = SparseOptions(mode, budget);
    return options;
  }

  SparseRun Run(const Degrees& degrees, const EngineOptions& options, int blocks = 64,
                int swap_blocks = 0) const {
    RankedEngine ranks(GetParam().checkpoint, degrees);
    const Status started = ranks.Start(options, blocks, swap_blocks);
    EXPECT_TRUE(started.ok()) << Message(started);
    if (!started.ok()) return {};
    SparseRun run = {.said = RunSparse(ranks.engine(), prompts_), .stats = ranks.engine().stats()};
    for (const Status& ended : ranks.End()) EXPECT_TRUE(ended.ok()) << Message(ended);
    return run;
  }

  // Ranks add their parts in other orders than one rank does, so that log-probabilities are nearly equal.
  static void ExpectSame(const SparseRun& a, const SparseRun& b) {
    ExpectSameOutput(a.said, b.said, 1e-3, "on ranks");
  }

  models::ModelInfo info_;
  std::vector<std::vector<int32_t>> prompts_;
};

TEST_P(RankedSparsityTest, ABudgetOfAllTokensIsDense) {
  const SparseRun all = Run(GetParam().degrees, Options(512));
  ExpectSame(all, Run({}, Options(512, SparsityMode::kDense)));
  EXPECT_EQ(all.stats.sparsity.selections, 0);
}

// C2a: ranks that have whole groups of query heads choose the blocks that one rank chooses.
TEST_P(RankedSparsityTest, WholeGroupsChooseLikeOneRank) {
  for (const SparsityMode mode : {SparsityMode::kDecode, SparsityMode::kAll}) {
    SCOPED_TRACE(ToString(mode));
    const EngineOptions options = Options(256, mode);
    const SparseRun one = Run({}, options), ranks = Run(GetParam().degrees, options);
    const kernels::SparsityCounters &of_one = one.stats.sparsity, &of_ranks = ranks.stats.sparsity;
    EXPECT_LT(of_one.blocks_read, of_one.blocks_all);
    EXPECT_LT(of_ranks.blocks_read, of_ranks.blocks_all);
    EXPECT_GT(of_ranks.missed.sum, 0);
    if (SharesKvHeads()) {
      EXPECT_GT(of_ranks.selections, of_one.selections) << "each rank chooses for its query heads";
    } else {
      EXPECT_EQ(of_ranks.selections, of_one.selections);
      EXPECT_EQ(of_ranks.blocks_read, of_one.blocks_read);
      ExpectSame(ranks, one);
    }
  }
}

// P2 and C5: outputs depend neither on chunks, nor on preemption, nor on drafts.
TEST_P(RankedSparsityTest, OutputsDoNotDependOnTheLoad) {
  for (const int reuse : {1, 5}) {
    SCOPED_TRACE(reuse);
    EngineOptions options = Options(256);
    options.sparsity.defaults.reuse = reuse;
    const SparseRun first = Run(GetParam().degrees, options);
    EXPECT_EQ(first.stats.sparsity.reused > 0, reuse > 1);
    EngineOptions other = options;
    other.max_batch_tokens = 37;
    ExpectSame(Run(GetParam().degrees, other), first);
    other = options;
    other.max_batch_tokens = 50;
    const SparseRun swapped = Run(GetParam().degrees, other, 9, 30);
    ExpectSame(swapped, first);
    if (GetParam().degrees.data == 1) {
      EXPECT_GT(swapped.stats.preemptions, 0);
      EXPECT_GT(swapped.stats.swapped_in, 0);
    }
    other = options;
    other.speculative = {.method = "ngram", .most_tokens = 3, .adaptive = false, .prompt_lookup_min = 1};
    const SparseRun drafted = Run(GetParam().degrees, other);
    ExpectSame(drafted, first);
    EXPECT_GT(drafted.stats.speculation.draft_tokens, 0);
    for (const SparseRun* run : {&first, &swapped, &drafted}) EXPECT_EQ(run->stats.sparsity.rechosen, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(All, RankedSparsityTest,
                         testing::Values(Case{"qwen3-moe-norm-tied", {.tensor = 2}},
                                         Case{"qwen3-moe-norm-tied", {.tensor = 3}},
                                         Case{"qwen3-moe-norm-tied", {.tensor = 2, .pipeline = 2}},
                                         Case{"qwen3-moe-norm-tied", {.data = 2, .expert = 2}},
                                         Case{"deepseek-v3-mtp", {.tensor = 2}},
                                         Case{"deepseek-v3-mtp", {.pipeline = 2}}),
                         NameOf);

}  // namespace
}  // namespace moesaic::engine
