// Long prefixes of which only key summaries are loaded from disk, over real models:
// docs/contracts/kv-tiers.md, K17 to K21.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <sstream>

#include "engine/engine.h"
#include "engine/kv_budget.h"
#include "models/test_session.h"

namespace moesaic::engine {
namespace {

struct LazyAnswer {
  std::vector<std::pair<int32_t, float>> said;  // output tokens and their log-probabilities
  int cached = 0, steps = 0;                    // before the first token
};

class LazyGoldenTest : public testing::TestWithParam<const char*> {
 protected:
  // The context of the golden models is too short for lazy loading, so that it is extended here.
  void SetUp() override {
    std::string pattern = testing::TempDir() + "lazy_XXXXXX";
    folder_ = mkdtemp(pattern.data());
    const std::string from = models::SourcePath(std::string("tests/golden/") + GetParam());
    std::filesystem::copy(from, folder_ / "model", std::filesystem::copy_options::recursive);
    std::stringstream text;
    text << std::ifstream(folder_ / "model/config.json").rdbuf();
    std::string config = text.str();
    const std::string_view context = "\"max_position_embeddings\": 512";
    ASSERT_NE(config.find(context), std::string::npos);
    config.replace(config.find(context), context.size(), "\"max_position_embeddings\": 2048");
    std::ofstream(folder_ / "model/config.json") << config;
    auto model = models::Model::Load(folder_ / "model", {.dtype = "f32", .progress = nullptr}, *threads_);
    ASSERT_TRUE(model.ok()) << Message(model.status());
    model_ = *std::move(model);
    std::mt19937 rng(1);
    prompt_.resize(1300);
    for (int32_t& id : prompt_) id = static_cast<int32_t>(rng() % model_->info().vocab_size);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::unique_ptr<Engine> Make(int dense_layers, int64_t step_bytes, int blocks = 64,
                               int warm_blocks = 0) const {
    const tensor::KvLayout layout = LayoutFor(model_->info().kv, tensor::DType::kF32, true);
    EngineOptions options;
    options.kv_bytes = blocks * layout.total_bytes();
    options.max_batch_tokens = 4096;
    options.warm_bytes = warm_blocks * (layout.total_bytes() + 1024);
    options.warm_exact = true;
    options.disk = DiskOptions{
        .folder = folder_ / "disk", .bytes = 64 << 20, .model = GetParam(), .step_bytes = step_bytes};
    options.sparsity = {.key_summaries = true,
                        .defaults = {.mode = SparsityMode::kAll, .budget = 256},
                        .dense_layers = dense_layers,
                        .audit_every = 0};
    auto engine = Engine::Create(*model_, kernels_, *threads_, options);
    EXPECT_TRUE(engine.ok()) << Message(engine.status());
    return *std::move(engine);
  }

  static Request Greedy(const std::vector<int32_t>& prompt, int priority = 0) {
    Request request;
    request.prompt = prompt;
    request.priority = priority;
    request.sampling.temperature = 0;
    request.sampling.max_tokens = 6;
    request.sampling.logprobs = 0;
    return request;
  }

  std::vector<int32_t> Another(uint32_t seed) const {
    std::mt19937 rng(seed);
    std::vector<int32_t> prompt(prompt_.size());
    for (int32_t& id : prompt) id = static_cast<int32_t>(rng() % model_->info().vocab_size);
    return prompt;
  }

  static LazyAnswer Generate(Engine& engine, const std::vector<int32_t>& prompt) {
    EXPECT_TRUE(engine.Add(Greedy(prompt)).ok());
    LazyAnswer answer;
    while (!engine.idle()) {
      std::vector<TokenEvent> events;
      EXPECT_TRUE(engine.Step(&events).ok());
      answer.steps += answer.said.empty() ? 1 : 0;
      for (const TokenEvent& event : events) {
        answer.cached += event.cached_tokens;
        if (event.token) answer.said.emplace_back(*event.token, event.logprobs.logprob);
      }
    }
    return answer;
  }

  const kernels::KernelTable kernels_ = kernels::SelectKernels(runtime::DetectCpu());
  const std::unique_ptr<runtime::ThreadPool> threads_ =
      *runtime::ThreadPool::Create({.threads = 2, .pin = false});
  std::filesystem::path folder_;
  std::unique_ptr<models::Model> model_;
  std::vector<int32_t> prompt_;
};

// K18: the work of a step is bounded, and outputs are the same.
TEST_P(LazyGoldenTest, KeySummariesAreLoadedInParts) {
  const int64_t summaries = KeySummaryBytesOf(model_->info().kv) * model_->info().kv.layers;
  LazyAnswer in_memory;
  {
    const auto engine = Make(1, 1 << 20);
    Generate(*engine, prompt_);
    in_memory = Generate(*engine, prompt_);
    EXPECT_EQ(in_memory.cached, 1280);
    engine->SaveCache();
  }
  for (const int64_t blocks : {1000, 3, 0}) {
    const auto engine = Make(1, blocks * summaries + 1);
    const LazyAnswer cold = Generate(*engine, prompt_);
    EXPECT_EQ(cold.said, in_memory.said);
    EXPECT_EQ(cold.cached, 1280);
    EXPECT_EQ(cold.steps, in_memory.steps + (blocks == 1000 ? 1 : blocks == 3 ? 7 : 20));
    const cache::DiskTierStats disk = engine->stats().disk;
    EXPECT_EQ(disk.borrowed_blocks, 20);
    EXPECT_EQ(disk.loads, 0);
    EXPECT_LT(disk.read_layers, 20 * model_->info().layers) << "only chosen blocks are read";
    EXPECT_GT(disk.read_layers, 20) << "the dense layer reads all blocks";
    EXPECT_EQ(Generate(*engine, prompt_).said, in_memory.said);
  }
}

// K15: shorter prefixes are loaded completely, into other blocks, and rows choose by their key summaries.
TEST_P(LazyGoldenTest, LoadedBlocksHaveTheirKeySummaries) {
  const std::vector<int32_t> prompt(prompt_.begin(), prompt_.begin() + 1000);
  LazyAnswer in_memory;
  {
    const auto engine = Make(1, 1 << 20);
    Generate(*engine, prompt);
    in_memory = Generate(*engine, prompt);
    engine->SaveCache();
  }
  const auto engine = Make(1, 1 << 20);
  Generate(*engine, Another(2));
  const LazyAnswer loaded = Generate(*engine, prompt);
  EXPECT_EQ(loaded.said, in_memory.said);
  EXPECT_EQ(loaded.cached, 960);
  EXPECT_EQ(engine->stats().disk.loaded_blocks, 15);
  EXPECT_EQ(engine->stats().disk.borrowed_blocks, 0);
  EXPECT_LT(engine->stats().sparsity.blocks_read, engine->stats().sparsity.blocks_all);
}

// A block can be copied (B10) as soon as all layers of the decoder are in memory, with or without MTP layers.
TEST_P(LazyGoldenTest, BlocksWithAllLayersCanBeCopied) {
  {
    const auto engine = Make(99, 1 << 20);
    Generate(*engine, prompt_);
    engine->SaveCache();
  }
  const auto engine = Make(99, 1 << 20);
  EXPECT_EQ(Generate(*engine, prompt_).cached, 1280);
  EXPECT_EQ(engine->stats().disk.read_layers, 20 * model_->info().layers);
  std::vector<int32_t> parted(prompt_.begin(), prompt_.begin() + 1000);
  parted.push_back(prompt_[1000] == 1 ? 2 : 1);
  EXPECT_EQ(Generate(*engine, parted).cached, 1000);
}

// W8: a request whose restored blocks were evicted waits while they are restored for another request. It does
// not read them from disk meanwhile.
TEST_P(LazyGoldenTest, DoesNotReadTheDiskDuringAWarmRestoreOfTheSameBlocks) {
  const auto engine = Make(1, 1 << 20, 45, 200);
  Generate(*engine, prompt_);
  const LazyAnswer first = Generate(*engine, prompt_);
  engine->SaveCache();
  for (const uint32_t seed : {2, 3, 4}) Generate(*engine, Another(seed));
  std::map<RequestId, int> cached;
  std::map<RequestId, std::vector<std::pair<int32_t, float>>> said;
  const auto step = [&] {
    std::vector<TokenEvent> events;
    EXPECT_TRUE(engine->Step(&events).ok());
    for (const TokenEvent& event : events) {
      cached[event.request] += event.cached_tokens;
      if (event.token) said[event.request].emplace_back(*event.token, event.logprobs.logprob);
    }
  };
  const RequestId waits = *engine->Add(Greedy(prompt_));
  step();
  EXPECT_EQ(engine->stats().warm.restored_blocks, 20);
  for (const uint32_t seed : {5, 6}) EXPECT_TRUE(engine->Add(Greedy(Another(seed), -1)).ok());
  step();
  EXPECT_EQ(engine->stats().running, 2) << "two requests overtake it, and most of its blocks are evicted";
  const RequestId same = *engine->Add(Greedy(prompt_, -1));
  while (!engine->idle()) step();
  EXPECT_EQ(engine->stats().warm.restored_blocks, 37);
  EXPECT_EQ(engine->stats().disk.borrowed_blocks, 0);
  for (const RequestId id : {waits, same}) {
    EXPECT_EQ(cached[id], 1280);
    EXPECT_EQ(said[id], first.said);
  }
}

// K21: blocks that are dropped because of damage are not stored in the warm tier. Its other blocks stay.
TEST_P(LazyGoldenTest, DamagedBlocksAreNotStoredInTheWarmTier) {
  {
    const auto engine = Make(1, 1 << 20);
    Generate(*engine, prompt_);
    engine->SaveCache();
  }
  const auto engine = Make(1, 1 << 20, 45, 200);
  for (const uint32_t seed : {2, 3, 4}) Generate(*engine, Another(seed));
  const cache::WarmTierStats before = engine->stats().warm;
  EXPECT_GT(before.blocks, 0);
  for (const auto& entry : std::filesystem::directory_iterator(folder_ / "disk")) {
    if (entry.path().extension() != ".segment") continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    const auto size = static_cast<int64_t>(entry.file_size());
    for (int64_t at = 0; at < size; at += 256) file.seekp(at).put('\x55');
  }
  Generate(*engine, prompt_);
  const EngineStats after = engine->stats();
  EXPECT_GT(after.disk.borrowed_blocks, 0);
  EXPECT_GT(after.disk.refused_blocks, 0);
  EXPECT_GE(after.warm.blocks, before.blocks);
  // Blocks that were evicted for its key summaries are stored in the warm tier. Blocks that were dropped
  // because of damage are not.
  EXPECT_LE(after.warm.stored_blocks - before.stored_blocks, 21);
}

INSTANTIATE_TEST_SUITE_P(Models, LazyGoldenTest, testing::Values("qwen3-moe-norm-tied", "deepseek-v3-mtp"),
                         [](const auto& info) { return models::TestName(info.param); });

}  // namespace
}  // namespace moesaic::engine
