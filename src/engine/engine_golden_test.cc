// The engine with real models. Outputs are those of the oracle under every load.
#include <cmath>
#include <map>

#include "engine/engine.h"
#include "engine/kv_budget.h"
#include "models/test_session.h"

namespace moesaic::engine {
namespace {

using models::GoldenPrompt;
using models::SourcePath;

class EngineGoldenTest : public testing::TestWithParam<const char*> {};

int64_t BlockBytes(const models::KvSpec& kv, tensor::DType dtype) {
  return LayoutFor(kv, dtype, /*key_summaries=*/false).total_bytes();
}

// More than twice the tokens of the oracle, so that sequences outgrow the blocks that admission reserves.
constexpr int kOutputTokens = 150;

struct GoldenLoad {
  int blocks, batch_tokens;
  bool preempts;
  int swap_blocks = 0;
};
// Prompts of 1, 7, 70 and 200 tokens, each used twice, need 3 + 3 + 4 + 6 blocks with their output, twice.
constexpr GoldenLoad kLoads[] = {{64, 512, false}, {64, 13, false}, {14, 50, true}, {14, 50, true, 14}};

using GoldenTokens = std::map<RequestId, std::vector<int32_t>>;

GoldenTokens RunAll(Engine& engine, const std::vector<GoldenPrompt>& golden) {
  for (size_t i = 0; i < 2 * golden.size(); ++i) {
    Request request;
    request.prompt = golden[i % golden.size()].ids;
    request.sampling.temperature = 0;
    request.sampling.max_tokens = kOutputTokens;
    EXPECT_EQ(*engine.Add(request), i + 1);
  }
  GoldenTokens said;
  while (!engine.idle()) {
    std::vector<TokenEvent> events;
    const Status status = engine.Step(&events);
    EXPECT_TRUE(status.ok()) << Message(status);
    if (!status.ok()) break;
    for (const TokenEvent& event : events) said[event.request].push_back(*event.token);
  }
  return said;
}

// All prompts run together: with room for all, in small chunks, and with so few blocks that some are
// preempted. Outputs begin with the tokens of the oracle and are the same under every load.
TEST_P(EngineGoldenTest, GreedyOutputsMatchTheOracleUnderEveryLoad) {
  const std::string path = SourcePath(std::string("tests/golden/") + GetParam());
  const std::vector<GoldenPrompt> golden = models::ReadGolden(path + "/golden.safetensors");
  const kernels::KernelTable kernels = kernels::SelectKernels(runtime::DetectCpu());
  const auto threads = *runtime::ThreadPool::Create({.threads = 2, .pin = false});
  const auto model = models::Model::Load(path, {.dtype = "f32", .progress = nullptr}, *threads);
  ASSERT_TRUE(model.ok()) << Message(model.status());
  GoldenTokens first;
  for (const GoldenLoad& load : kLoads) {
    auto engine =
        Engine::Create(**model, kernels, *threads,
                       {.kv_bytes = load.blocks * BlockBytes((*model)->info().kv, tensor::DType::kF32),
                        .swap_bytes = load.swap_blocks * BlockBytes((*model)->info().kv, tensor::DType::kF32),
                        .max_sequences = 8,
                        .max_batch_tokens = load.batch_tokens});
    ASSERT_TRUE(engine.ok()) << Message(engine.status());
    const GoldenTokens said = RunAll(**engine, golden);
    EXPECT_EQ((*engine)->stats().preemptions > 0, load.preempts);
    for (const auto& [id, tokens] : said) {
      const std::vector<int32_t>& oracle = golden[(id - 1) % golden.size()].greedy;
      const std::vector<int32_t> begin(tokens.begin(), tokens.begin() + static_cast<int64_t>(oracle.size()));
      EXPECT_EQ(begin, oracle) << "request " << id << ", " << load.blocks << " blocks";
    }
    if (first.empty()) first = said;
    EXPECT_EQ(said, first) << load.blocks << " blocks, " << load.batch_tokens << " rows a step";
  }
}

// Accepted and rejected drafts do not change outputs under any load.
TEST_P(EngineGoldenTest, SpeculationKeepsOutputs) {
  const std::string path = SourcePath(std::string("tests/golden/") + GetParam());
  const std::vector<GoldenPrompt> golden = models::ReadGolden(path + "/golden.safetensors");
  const kernels::KernelTable kernels = kernels::SelectKernels(runtime::DetectCpu());
  const auto threads = *runtime::ThreadPool::Create({.threads = 2, .pin = false});
  const auto model = models::Model::Load(path, {.dtype = "f32", .progress = nullptr}, *threads);
  ASSERT_TRUE(model.ok()) << Message(model.status());
  const models::ModelInfo& info = (*model)->info();
  GoldenTokens first;
  for (const std::string method : {"off", "ngram", "auto"}) {
    for (const GoldenLoad& load : kLoads) {
      const int64_t block = BlockBytes(info.kv, tensor::DType::kF32);
      auto engine = Engine::Create(
          **model, kernels, *threads,
          {.kv_bytes = load.blocks * block,
           .swap_bytes = load.swap_blocks * block,
           .max_sequences = 8,
           .max_batch_tokens = load.batch_tokens,
           .speculative = {.method = method, .most_tokens = 3, .adaptive = false, .prompt_lookup_min = 1}});
      ASSERT_TRUE(engine.ok()) << Message(engine.status());
      const GoldenTokens said = RunAll(**engine, golden);
      if (first.empty()) first = said;
      EXPECT_EQ(said, first) << method << ", " << load.blocks << " blocks, " << load.batch_tokens << " rows";
      if (method != "off") {
        EXPECT_GT((*engine)->stats().speculation.draft_tokens, 100) << method;
      }
    }
  }
}

// Returns the root mean square of the error over that of the logits.
double RelativeError(std::span<const float> found, std::span<const float> expected) {
  double error = 0, all = 0;
  for (size_t i = 0; i < found.size(); ++i) {
    error += std::pow(double{found[i]} - expected[i], 2);
    all += std::pow(double{expected[i]}, 2);
  }
  return std::sqrt(error / all);
}

// The error of an int8 key or value is at most amax / 254, and its root mean square is amax / 440. That is
// 0.3 to 0.7 % of a row whose largest element is 1.5 to 3 times its root mean square. These checkpoints have
// random weights, whose layers neither reduce nor amplify such errors, so the error of logits is about the
// same. Where the scores of two experts are close enough, the error selects another expert, and the row
// changes by the difference of their outputs.
constexpr double kInt8Error = 0.015;
constexpr double kInt8Flip = 0.2;

TEST_P(EngineGoldenTest, Int8CacheKeepsLogitsNearTheExactLogits) {
  const std::string path = SourcePath(std::string("tests/golden/") + GetParam());
  const std::vector<GoldenPrompt> golden = models::ReadGolden(path + "/golden.safetensors");
  const kernels::KernelTable kernels = kernels::SelectKernels(runtime::DetectCpu());
  const auto threads = *runtime::ThreadPool::Create({.threads = 2, .pin = false});
  const auto model = models::Model::Load(path, {.dtype = "f32", .progress = nullptr}, *threads);
  ASSERT_TRUE(model.ok()) << Message(model.status());
  const models::ModelInfo& info = (*model)->info();
  GoldenTokens first;
  for (const GoldenLoad& load : kLoads) {
    auto engine = Engine::Create(**model, kernels, *threads,
                                 {.kv_bytes = load.blocks * BlockBytes(info.kv, tensor::DType::kI8),
                                  .kv_dtype = "int8",
                                  .swap_bytes = load.swap_blocks * BlockBytes(info.kv, tensor::DType::kI8),
                                  .max_sequences = 8,
                                  .max_batch_tokens = load.batch_tokens});
    ASSERT_TRUE(engine.ok()) << Message(engine.status());
    EXPECT_EQ((*engine)->stats().total_blocks, load.blocks);
    std::vector<double> errors;  // one for each row
    for (const GoldenPrompt& prompt : golden) {
      std::vector<float> all;
      const Status scored = (*engine)->Score(prompt.ids, [&all](int64_t, std::span<const float> rows) {
        all.insert(all.end(), rows.begin(), rows.end());
        return OkStatus();
      });
      ASSERT_TRUE(scored.ok()) << Message(scored);
      for (size_t i = 0; i < prompt.rows.size(); ++i) {
        const size_t vocab = info.vocab_size;
        errors.push_back(RelativeError(std::span(all).subspan(prompt.rows[i] * vocab, vocab),
                                       std::span(prompt.logits).subspan(i * vocab, vocab)));
      }
    }
    std::sort(errors.begin(), errors.end());
    EXPECT_LE(errors[errors.size() / 2], kInt8Error);
    EXPECT_LE(errors.back(), kInt8Flip);
    EXPECT_GT(errors.back(), 1e-4) << "int8 must round";
    RecordProperty("median", std::to_string(errors[errors.size() / 2]));
    RecordProperty("worst", std::to_string(errors.back()));
    const GoldenTokens said = RunAll(**engine, golden);
    EXPECT_EQ((*engine)->stats().preemptions > 0, load.preempts);
    if (first.empty()) first = said;
    EXPECT_EQ(said, first) << load.blocks << " blocks, " << load.batch_tokens << " rows a step";
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, EngineGoldenTest,
                         testing::Values("deepseek-v2-lite", "deepseek-v3-mtp", "qwen3-moe-norm-tied",
                                         "llama3-rope-bias", "pangu-ultra-moe-mtp"),
                         [](const auto& info) { return models::TestName(info.param); });

}  // namespace
}  // namespace moesaic::engine
