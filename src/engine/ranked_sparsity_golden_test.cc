// Attention over chosen blocks on several ranks, which are threads here: docs/contracts/sparsity.md.
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "engine/ranked_engine.h"

namespace moesaic::engine {
namespace {

using parallel::Degrees;

struct SparseRun {
  std::map<RequestId, std::vector<std::pair<int32_t, float>>> said;  // tokens and their log-probabilities
  EngineStats stats;
};

class RankedSparsityTest : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    info_ = RankedEngine(GetParam().checkpoint, {}).info();
    std::mt19937 rng(1);
    for (const int length : {300, 330, 385, 70}) {
      std::vector<int32_t>& prompt = prompts_.emplace_back(length);
      for (int32_t& id : prompt) id = static_cast<int32_t>(rng() % info_.vocab_size);
    }
    std::copy_n(prompts_[0].begin(), 256, prompts_[1].begin());  // both begin with the same four blocks
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
    options.sparsity = {.key_summaries = true,
                        .defaults = {.mode = mode, .budget = budget},
                        .dense_layers = 1,
                        .audit_every = 1};
    return options;
  }

  SparseRun Run(const Degrees& degrees, const EngineOptions& options, int blocks = 64,
                int swap_blocks = 0) const {
    RankedEngine ranks(GetParam().checkpoint, degrees);
    const Status started = ranks.Start(options, blocks, swap_blocks);
    EXPECT_TRUE(started.ok()) << Message(started);
    if (!started.ok()) return {};
    Engine& engine = ranks.engine();
    for (const std::vector<int32_t>& prompt : prompts_) {
      Request request;
      request.prompt = prompt;
      request.sampling.temperature = 0;
      request.sampling.max_tokens = 120;
      request.sampling.logprobs = 0;
      const auto id = engine.Add(std::move(request));
      EXPECT_TRUE(id.ok()) << Message(id.status());
    }
    SparseRun run;
    while (!engine.idle()) {
      std::vector<TokenEvent> events;
      const Status stepped = engine.Step(&events);
      EXPECT_TRUE(stepped.ok()) << Message(stepped);
      if (!stepped.ok()) break;
      for (const TokenEvent& event : events) {
        if (event.token) run.said[event.request].emplace_back(*event.token, event.logprobs.logprob);
      }
    }
    run.stats = engine.stats();
    for (const Status& ended : ranks.End()) EXPECT_TRUE(ended.ok()) << Message(ended);
    return run;
  }

  // Ranks add their parts in other orders than one rank does, so that log-probabilities are nearly equal.
  static void ExpectSame(const SparseRun& a, const SparseRun& b) {
    ASSERT_EQ(a.said.size(), b.said.size());
    for (const auto& [id, tokens] : a.said) {
      const auto& others = b.said.at(id);
      ASSERT_EQ(tokens.size(), others.size());
      for (size_t i = 0; i < tokens.size(); ++i) {
        ASSERT_EQ(tokens[i].first, others[i].first) << "request " << id << ", token " << i;
        ASSERT_NEAR(tokens[i].second, others[i].second, 1e-3) << "request " << id << ", token " << i;
      }
    }
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
