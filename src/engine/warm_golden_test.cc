// Blocks that are restored from int8, with real models: docs/contracts/kv-tiers.md, W1 to W9.
#include <unistd.h>

#include <filesystem>
#include <map>
#include <memory>
#include <random>

#include "engine/engine.h"
#include "engine/kv_budget.h"
#include "models/test_session.h"

namespace moesaic::engine {
namespace {

using ScoredTokens = std::vector<std::pair<int32_t, float>>;  // tokens and their log-probabilities

class WarmGoldenTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string path = models::SourcePath(std::string("tests/golden/") + GetParam());
    auto model = models::Model::Load(path, {.dtype = "f32", .progress = nullptr}, *threads_);
    ASSERT_TRUE(model.ok()) << Message(model.status());
    model_ = *std::move(model);
    std::string pattern = testing::TempDir() + "warm_XXXXXX";
    folder_ = mkdtemp(pattern.data());
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  EngineOptions Options(const char* dtype, bool key_summaries = false) const {
    const int64_t block =
        LayoutFor(model_->info().kv, *KvDType(dtype, model_->info()), key_summaries).total_bytes();
    EngineOptions options = {
        .kv_bytes = 9 * block, .kv_dtype = dtype, .warm_bytes = 40 * (block + 1024), .max_sequences = 2};
    options.sparsity.key_summaries = key_summaries;
    options.sparsity.dense_layers = 1;
    return options;
  }

  std::unique_ptr<Engine> Make(const EngineOptions& options) const {
    auto engine = Engine::Create(*model_, kernels_, *threads_, options);
    EXPECT_TRUE(engine.ok()) << Message(engine.status());
    return *std::move(engine);
  }

  std::vector<int32_t> Prompt(int length, uint32_t seed) const {
    std::mt19937 rng(seed);
    std::vector<int32_t> prompt(length);
    for (int32_t& id : prompt) id = static_cast<int32_t>(rng() % model_->info().vocab_size);
    return prompt;
  }

  static ScoredTokens RunOne(Engine& engine, const std::vector<int32_t>& prompt, int cached,
                             std::optional<RequestSparsity> sparsity = std::nullopt) {
    Request request;
    request.prompt = prompt;
    request.sampling.temperature = 0;
    request.sampling.max_tokens = 8;
    request.sampling.logprobs = 0;
    request.sparsity = sparsity;
    EXPECT_TRUE(engine.Add(std::move(request)).ok());
    ScoredTokens said;
    while (!engine.idle()) {
      std::vector<TokenEvent> events;
      EXPECT_TRUE(engine.Step(&events).ok());
      for (const TokenEvent& event : events) {
        if (said.empty() && event.token) {
          EXPECT_EQ(event.cached_tokens, cached);
        }
        if (event.token) said.emplace_back(*event.token, event.logprobs.logprob);
      }
    }
    return said;
  }

  const kernels::KernelTable kernels_ = kernels::SelectKernels(runtime::DetectCpu());
  const std::unique_ptr<runtime::ThreadPool> threads_ =
      *runtime::ThreadPool::Create({.threads = 2, .pin = false});
  std::unique_ptr<models::Model> model_;
  std::string folder_;
};

// W4: outputs are nearly the same. An eighth of a nat is far more than the effect of int8 on these small
// models, and far less than the effect of another prompt.
TEST_P(WarmGoldenTest, Int8BlocksGiveNearlyTheComputedOutput) {
  for (const char* dtype : {"f32", "bf16"}) {
    const auto engine = Make(Options(dtype));
    const std::vector<int32_t> prompt = Prompt(400, 1);
    const ScoredTokens computed = RunOne(*engine, prompt, 0);
    RunOne(*engine, Prompt(400, 2), 0);
    const ScoredTokens warm = RunOne(*engine, prompt, 384);
    EXPECT_GT(engine->stats().warm.restored_blocks, 0);
    EXPECT_EQ(warm[0].first, computed[0].first) << dtype;
    EXPECT_NE(warm[0].second, computed[0].second) << dtype << ": int8 can't be exact";
    EXPECT_NEAR(warm[0].second, computed[0].second, 0.125) << dtype;
    const EngineStats stats = engine->stats();
    EXPECT_LT(stats.warm.bytes / stats.warm.blocks,
              LayoutFor(model_->info().kv, *KvDType(dtype, model_->info()), false).block_bytes() * 5 / 8);
  }
}

// W3: if the cache itself is int8, restored blocks and outputs are bit-identical.
TEST_P(WarmGoldenTest, RestoresInt8CachesExactly) {
  const auto engine = Make(Options("int8"));
  const std::vector<int32_t> prompt = Prompt(400, 1);
  RunOne(*engine, prompt, 0);
  const ScoredTokens cached = RunOne(*engine, prompt, 384);
  RunOne(*engine, Prompt(400, 2), 0);
  const ScoredTokens warm = RunOne(*engine, prompt, 384);
  EXPECT_GT(engine->stats().warm.restored_blocks, 0);
  EXPECT_EQ(warm, cached);
}

// W5: blocks that were restored from int8, and blocks after them, are not stored on disk. Exact blocks are.
TEST_P(WarmGoldenTest, LossyBlocksAreNotStoredOnDisk) {
  const std::vector<int32_t> prompt = Prompt(330, 1);
  std::vector<int32_t> longer = prompt;
  for (const int32_t id : Prompt(120, 3)) longer.push_back(id);
  EngineOptions options = Options("f32");
  options.disk = DiskOptions{.folder = folder_, .bytes = 64 << 20, .model = GetParam()};
  ScoredTokens exact;
  {
    EngineOptions alone = Options("f32");
    alone.warm_bytes = 0;
    exact = RunOne(*Make(alone), longer, 0);
  }
  {
    const auto engine = Make(options);
    RunOne(*engine, prompt, 0);  // five blocks are to be stored
    engine->SaveCache();
    EXPECT_EQ(engine->stats().disk.blocks, 5);
    for (const uint32_t seed : {4U, 5U})
      RunOne(*engine, Prompt(400, seed), 0);  // evicts all blocks of the prompt
    engine->SaveCache();
    const int64_t before = engine->stats().disk.blocks;
    RunOne(*engine, longer, 320);  // restores blocks from int8, and computes two blocks after them
    EXPECT_GT(engine->stats().warm.restored_blocks, 4);
    engine->SaveCache();
    EXPECT_EQ(engine->stats().disk.blocks, before) << "blocks after lossy blocks are lossy too";
    EXPECT_EQ(engine->stats().disk.lost_blocks, 0);
    // They still serve later requests from the tree.
    RunOne(*engine, longer, 448);
  }
  const auto engine = Make(options);
  const ScoredTokens again = RunOne(*engine, longer, 320);
  ASSERT_EQ(again.size(), exact.size());
  for (size_t i = 0; i < exact.size(); ++i) {  // blocks on disk are exact; MLA rounds chunks differently
    EXPECT_EQ(again[i].first, exact[i].first);
    EXPECT_NEAR(again[i].second, exact[i].second, model_->info().kv.shared ? 1e-4 : 0);
  }
}

// Summaries are built again from the restored keys, so that choices depend on the restored keys.
TEST_P(WarmGoldenTest, RebuildsKeySummariesOfRestoredBlocks) {
  EngineOptions options = Options("bf16", /*key_summaries=*/true);
  options.sparsity.audit_every = 1;
  const auto engine = Make(options);
  const RequestSparsity all = {.mode = SparsityMode::kAll, .budget = 256};
  const std::vector<int32_t> prompt = Prompt(400, 1);
  const ScoredTokens computed = RunOne(*engine, prompt, 0, all);
  RunOne(*engine, Prompt(400, 2), 0);
  const ScoredTokens warm = RunOne(*engine, prompt, 384, all);
  EXPECT_GT(engine->stats().warm.restored_blocks, 0);
  EXPECT_NEAR(warm[0].second, computed[0].second, 0.25);
  EXPECT_GT(engine->stats().sparsity.missed.count(), 0);
}

INSTANTIATE_TEST_SUITE_P(Models, WarmGoldenTest,
                         testing::Values("qwen3-moe-norm-tied", "deepseek-v3-mtp", "llama3-rope-bias"),
                         [](const auto& info) { return models::TestName(info.param); });

}  // namespace
}  // namespace moesaic::engine
