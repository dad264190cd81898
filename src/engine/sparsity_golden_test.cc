// Attention over chosen blocks in the engine, with real models: docs/contracts/sparsity.md.
#include <memory>

#include "engine/engine.h"
#include "engine/kv_budget.h"
#include "engine/test_sparsity.h"
#include "models/test_session.h"

namespace moesaic::engine {
namespace {

// Fails one in `every` steps after it is computed.
class UndoneModel : public models::Model {
 public:
  UndoneModel(models::Model& model, int every) : model_(model), every_(every) {}
  const models::ModelInfo& info() const override { return model_.info(); }
  Status Forward(const kernels::ExecContext& ctx, const models::ForwardBatch& batch,
                 std::span<const kernels::KvLayer> kv, const models::ForwardOutput& out) override {
    RETURN_IF_ERROR(model_.Forward(ctx, batch, kv, out));
    return ++steps_ % every_ == 0 ? absl::InternalError("undone") : OkStatus();
  }
  Status ForwardMtp(const kernels::ExecContext& ctx, int depth, const models::ForwardBatch& batch,
                    std::span<const float> hidden, std::span<const kernels::KvLayer> kv,
                    const models::ForwardOutput& out) override {
    return model_.ForwardMtp(ctx, depth, batch, hidden, kv, out);
  }

 private:
  models::Model& model_;
  const int every_;
  int steps_ = 0;
};

class SparsityGoldenTest : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string path = models::SourcePath(std::string("tests/golden/") + GetParam());
    auto model = models::Model::Load(path, {.dtype = "f32", .progress = nullptr}, *threads_);
    ASSERT_TRUE(model.ok()) << Message(model.status());
    model_ = *std::move(model);
    prompts_ = SparsePrompts(model_->info().vocab_size);
  }

  std::unique_ptr<Engine> Make(const SparsityOptions& sparsity, int blocks = 64, int batch_tokens = 512,
                               int swap_blocks = 0, bool prefix_cache = true, const char* drafter = "off",
                               models::Model* model = nullptr) const {
    const int64_t block =
        LayoutFor(model_->info().kv, tensor::DType::kF32, sparsity.key_summaries, sparsity.summary_kind)
            .total_bytes();
    auto engine = Engine::Create(
        model == nullptr ? *model_ : *model, kernels_, *threads_,
        {.kv_bytes = blocks * block,
         .swap_bytes = swap_blocks * block,
         .max_sequences = 8,
         .max_batch_tokens = batch_tokens,
         .prefix_cache = prefix_cache,
         .speculative = {.method = drafter, .most_tokens = 3, .adaptive = false, .prompt_lookup_min = 1},
         .sparsity = sparsity});
    EXPECT_TRUE(engine.ok()) << Message(engine.status());
    return *std::move(engine);
  }

  // MLA rounds chunks of different sizes differently: tokens are equal, and log-probabilities are nearly
  // equal.
  void ExpectSame(const SparseOutput& a, const SparseOutput& b, const std::string& what) const {
    ExpectSameOutput(a, b, model_->info().kv.shared ? 1e-4 : 0, what);
  }

  const kernels::KernelTable kernels_ = kernels::SelectKernels(runtime::DetectCpu());
  const std::unique_ptr<runtime::ThreadPool> threads_ =
      *runtime::ThreadPool::Create({.threads = 2, .pin = false});
  std::unique_ptr<models::Model> model_;
  std::vector<std::vector<int32_t>> prompts_;
};

// P1: rows that choose no blocks give the same bits as without key summaries, also with MLA.
TEST_P(SparsityGoldenTest, ABudgetOfAllTokensIsDense) {
  const SparseOutput dense = RunSparse(*Make({}), prompts_);
  for (const KeySummaryKind kind : {KeySummaryKind::kBox, KeySummaryKind::kSketch}) {
    for (const SparsityMode mode : {SparsityMode::kDense, SparsityMode::kDecode, SparsityMode::kAll}) {
      SparsityOptions options = SparseOptions(mode, 512);
      options.summary_kind = kind;
      const auto engine = Make(options);
      EXPECT_EQ(RunSparse(*engine, prompts_), dense) << ToString(mode);
      EXPECT_EQ(engine->stats().sparsity.selections, 0);
    }
  }
}

// Rows choose blocks by their sketches, which gives other blocks than boxes.
TEST_P(SparsityGoldenTest, SketchesChooseTheirOwnBlocks) {
  SparsityOptions options = SparseOptions(SparsityMode::kAll, 256);
  options.summary_kind = KeySummaryKind::kSketch;
  const auto sketches = Make(options), boxes = Make(SparseOptions(SparsityMode::kAll, 256));
  const SparseOutput said = RunSparse(*sketches, prompts_);
  EXPECT_GT(sketches->stats().sparsity.selections, 0);
  EXPECT_LT(sketches->stats().sparsity.blocks_read, sketches->stats().sparsity.blocks_all);
  EXPECT_NE(said, RunSparse(*boxes, prompts_));
}

// P2: outputs do not depend on chunks, other requests, preemption, swap, drafts and the cache.
TEST_P(SparsityGoldenTest, OutputsDoNotDependOnTheLoad) {
  for (const SparsityMode mode : {SparsityMode::kDecode, SparsityMode::kAll}) {
    const SparsityOptions options = SparseOptions(mode, 256);
    const auto engine = Make(options);
    const SparseOutput first = RunSparse(*engine, prompts_);
    const kernels::SparsityCounters& counters = engine->stats().sparsity;
    EXPECT_GT(counters.selections, 0);
    EXPECT_LT(counters.blocks_read, counters.blocks_all);
    EXPECT_GT(counters.missed.sum, 0);
    const std::string name = ToString(mode);
    ExpectSame(RunSparse(*Make(options, 64, 37), prompts_), first, name + " in chunks of 37");
    ExpectSame(RunSparse(*Make(options, 64, 512, 0, false), prompts_), first, name + " without a cache");
    const auto small = Make(options, 9, 50);
    ExpectSame(RunSparse(*small, prompts_), first, name + " preempted");
    EXPECT_GT(small->stats().preemptions, 0);
    const auto swapping = Make(options, 9, 50, 30);
    ExpectSame(RunSparse(*swapping, prompts_), first, name + " swapped");
    const auto drafting = Make(options, 64, 512, 0, true, "ngram");
    ExpectSame(RunSparse(*drafting, prompts_), first, name + " with drafts");
    EXPECT_GT(drafting->stats().speculation.draft_tokens, 20);
    for (size_t i = 0; i < prompts_.size(); ++i) {
      ExpectSame(RunSparse(*Make(options), {prompts_[i]}), {{1, first.at(i + 1)}}, name + " alone");
    }
  }
}

// C5: the same holds if rows share the choice of an earlier row.
TEST_P(SparsityGoldenTest, OutputsWithReuseDoNotDependOnTheLoad) {
  for (const SparsityMode mode : {SparsityMode::kDecode, SparsityMode::kAll}) {
    SparsityOptions options = SparseOptions(mode, 320);
    const SparseOutput each = RunSparse(*Make(options), prompts_);
    options.defaults.reuse = 5;
    const auto engine = Make(options);
    const SparseOutput first = RunSparse(*engine, prompts_);
    EXPECT_NE(first, each);
    const kernels::SparsityCounters& counters = engine->stats().sparsity;
    EXPECT_GT(counters.reused, counters.selections / 2);
    EXPECT_LT(counters.reused, counters.selections);
    EXPECT_LT(counters.blocks_read, counters.blocks_all);
    const std::string name = std::string("reuse, ") + ToString(mode);
    SparseOutput cached;
    for (const auto& [id, tokens] : RunSparse(*engine, prompts_)) cached[id - prompts_.size()] = tokens;
    ExpectSame(cached, first, name + " from the cache");
    ExpectSame(RunSparse(*Make(options, 64, 37), prompts_), first, name + " in chunks of 37");
    ExpectSame(RunSparse(*Make(options, 64, 512, 0, false), prompts_), first, name + " without a cache");
    const auto small = Make(options, 9, 50);
    ExpectSame(RunSparse(*small, prompts_), first, name + " preempted");
    EXPECT_GT(small->stats().preemptions, 0);
    const auto swapping = Make(options, 9, 50, 30);
    ExpectSame(RunSparse(*swapping, prompts_), first, name + " swapped");
    const auto drafting = Make(options, 64, 512, 0, true, "ngram");
    ExpectSame(RunSparse(*drafting, prompts_), first, name + " with drafts");
    EXPECT_GT(drafting->stats().speculation.draft_tokens, 20);
    for (const int rows : {37, 200}) {
      UndoneModel undone(*model_, 2);
      for (const char* drafter : {"off", "ngram"}) {
        const auto repeating = Make(options, 64, rows, 0, true, drafter, &undone);
        ExpectSame(RunSparse(*repeating, prompts_), first, name + " with steps that are undone");
        EXPECT_EQ(repeating->stats().sparsity.rechosen, 0);
      }
    }
    for (const auto* other : {&engine, &small, &swapping, &drafting}) {
      EXPECT_EQ((*other)->stats().sparsity.rechosen, 0);
    }
    // A prompt that diverges from a cached one inside a block copies only whole groups of the block.
    std::vector<int32_t> parted(prompts_[2].begin(), prompts_[2].begin() + 333);
    parted.push_back(prompts_[2][333] == 1 ? 2 : 1);
    ExpectSame({{1, RunSparse(*engine, {parted}).begin()->second}}, RunSparse(*Make(options), {parted}),
               name + " parted");
  }
}

// P4: blocks of sparse rows are not found by requests that would compute them differently.
TEST_P(SparsityGoldenTest, SparseOutputBlocksAreNotSharedWithPrompts) {
  const auto engine = Make(SparseOptions(SparsityMode::kDecode, 256));
  const SparseOutput first = RunSparse(*engine, {prompts_[0]});
  std::vector<int32_t> longer = prompts_[0];
  for (const auto& [token, logprob] : first.at(1)) longer.push_back(token);
  const RequestSparsity dense = {.mode = SparsityMode::kDense};
  for (const auto& sparsity : {std::optional<RequestSparsity>(), std::optional(dense)}) {
    const auto fresh = Make(SparseOptions(SparsityMode::kDecode, 256));
    const int64_t hits = engine->stats().cache_hits;
    const SparseOutput again = RunSparse(*engine, {longer}, sparsity);
    ExpectSame({{1, again.begin()->second}}, RunSparse(*fresh, {longer}, sparsity), "after an output");
    if (!sparsity) {
      EXPECT_EQ(engine->stats().cache_hits - hits, 300 / 64 * 64)
          << "the whole blocks of the prompt are found";
    }
  }
}

// P4: sparse prompts share blocks with prompts of the same settings.
TEST_P(SparsityGoldenTest, SparsePromptsShareBlocksOnlyAtEqualSettings) {
  const auto engine = Make(SparseOptions(SparsityMode::kDecode, 256));
  const RequestSparsity all = {.mode = SparsityMode::kAll, .budget = 256};
  const SparseOutput first = RunSparse(*engine, {prompts_[2]}, all);
  const SparseOutput dense = RunSparse(*engine, {prompts_[2]}, RequestSparsity{});
  EXPECT_EQ(engine->stats().cache_hits, 0) << "dense prompts find no sparse blocks";
  const SparseOutput again = RunSparse(*engine, {prompts_[2]}, all);
  EXPECT_EQ(engine->stats().cache_hits, 384);
  ExpectSame({{1, again.begin()->second}}, {{1, first.begin()->second}}, "from the cache");
  RunSparse(*engine, {prompts_[2]}, RequestSparsity{.mode = SparsityMode::kAll, .budget = 320});
  EXPECT_EQ(engine->stats().cache_hits, 384) << "prompts with another budget find no such blocks";
}

TEST_P(SparsityGoldenTest, RefusesInvalidRequests) {
  const auto engine = Make({});
  Request request;
  request.prompt = {1};
  request.sparsity = RequestSparsity{.mode = SparsityMode::kDecode};
  EXPECT_EQ(Message(engine->Check(request)),
            "kv_sparsity: mode decode needs the key summaries that --kv-sparsity turns on");
  request.sparsity = RequestSparsity{.budget = 255};
  EXPECT_EQ(Message(engine->Check(request)),
            "kv_sparsity: the budget must be at least 256 tokens, found 255");
  request.sparsity = RequestSparsity{.reuse = 65};
  EXPECT_EQ(Message(engine->Check(request)), "kv_sparsity: reuse must be in [1, 64], found 65");
}

// Rows of a scored text choose blocks if rows of prompts do.
TEST_P(SparsityGoldenTest, ScoringUsesThePromptSettings) {
  const auto score = [&](const SparsityOptions& options) {
    std::vector<float> logits;
    const auto engine = Make(options);
    EXPECT_TRUE(engine
                    ->Score(prompts_[2],
                            [&](int64_t, std::span<const float> rows) {
                              logits.insert(logits.end(), rows.begin(), rows.end());
                              return OkStatus();
                            })
                    .ok());
    return logits;
  };
  const std::vector<float> dense = score({});
  EXPECT_EQ(score(SparseOptions(SparsityMode::kAll, 512)), dense);
  EXPECT_EQ(score(SparseOptions(SparsityMode::kDecode, 256)), dense);
  const std::vector<float> sparse = score(SparseOptions(SparsityMode::kAll, 256));
  EXPECT_NE(sparse, dense);
}

INSTANTIATE_TEST_SUITE_P(Models, SparsityGoldenTest,
                         testing::Values("qwen3-moe-norm-tied", "deepseek-v3-mtp", "llama3-rope-bias"),
                         [](const auto& info) { return models::TestName(info.param); });

}  // namespace
}  // namespace moesaic::engine
