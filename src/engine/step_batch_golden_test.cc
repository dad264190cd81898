// Serialized batches on a second executor, over real models: choices that rows share, warm slots and key
// summaries (docs/contracts/executors.md).
#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/kv_budget.h"
#include "engine/local_executor.h"
#include "models/test_session.h"

namespace moesaic::engine {
namespace {

using cache::KvArea;
using cache::KvOpKind;

class StepBatchGoldenTest : public testing::TestWithParam<const char*> {
 protected:
  static constexpr int kBlocks = 20;

  void SetUp() override {
    const std::string path = models::SourcePath(std::string("tests/golden/") + GetParam());
    for (int i = 0; i < 2; ++i) {
      auto model = models::Model::Load(path, {.dtype = "f32", .progress = nullptr}, *threads_);
      ASSERT_TRUE(model.ok()) << Message(model.status());
      models_[i] = *std::move(model);
      const tensor::KvLayout layout =
          LayoutFor(models_[i]->info().kv, tensor::DType::kF32, /*key_summaries=*/true);
      auto store = cache::KvStore::Create({.layout = layout, .blocks = kBlocks, .warm_slots = 4}, *threads_);
      ASSERT_TRUE(store.ok()) << Message(store.status());
      stores_[i] = *std::move(store);
      executors_[i] = std::make_unique<LocalExecutor>(*models_[i], kernels_, *threads_, *stores_[i],
                                                      /*first_sparse_layer=*/1);
    }
    std::mt19937 random(1);
    for (int32_t& token : tokens_) token = static_cast<int32_t>(random() % models_[0]->info().vocab_size);
  }

  // Runs the batch on one executor and its bytes on the other; checks that results and blocks are equal.
  // Returns the counters.
  kernels::SparsityCounters Run(const StepBatch& batch) {
    const std::string bytes = Serialize(batch);
    const StatusOr<StepBatch> parsed = ParseStepBatch(std::as_bytes(std::span(bytes)));
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    const Status checked = CheckBatch(*parsed, executors_[1]->limits());
    EXPECT_TRUE(checked.ok()) << checked;
    const StatusOr<StepResult> here = executors_[0]->Run(batch), there = executors_[1]->Run(*parsed);
    EXPECT_TRUE(here.ok()) << here.status();
    EXPECT_TRUE(there.ok()) << there.status();
    EXPECT_TRUE(std::ranges::equal(here->logits, there->logits));
    EXPECT_EQ(here->kv.rejected_slots, there->kv.rejected_slots);
    const kernels::SparsityCounters &a = here->sparsity, &b = there->sparsity;
    EXPECT_EQ(a.selections, b.selections);
    EXPECT_EQ(a.reused, b.reused);
    EXPECT_EQ(a.rechosen, b.rechosen);
    EXPECT_EQ(a.blocks_read, b.blocks_read);
    EXPECT_EQ(a.missed.counts, b.missed.counts);
    EXPECT_EQ(a.missed.sum, b.missed.sum);
    for (int i = 0; i < kBlocks; ++i) EXPECT_EQ(Checksum(i), stores_[1]->Checksum(i)) << i;
    return a;
  }
  uint64_t Checksum(int32_t block) const { return stores_[0]->Checksum(block); }

  const kernels::KernelTable kernels_ = kernels::SelectKernels(runtime::DetectCpu());
  const std::unique_ptr<runtime::ThreadPool> threads_ =
      *runtime::ThreadPool::Create({.threads = 2, .pin = false});
  std::unique_ptr<models::Model> models_[2];
  std::unique_ptr<cache::KvStore> stores_[2];
  std::unique_ptr<LocalExecutor> executors_[2];
  std::vector<int32_t> tokens_ = std::vector<int32_t>(500);
};

TEST_P(StepBatchGoldenTest, ASecondExecutorAppliesSharedChoicesAndWarmBlocks) {
  const kernels::SparsitySettings setting = {.budget_blocks = 4, .reuse = 5, .audit_every = 3};
  const std::span<const int32_t> tokens = tokens_;
  std::vector<int32_t> table_a = {3, 1, 4, 15, 9, 2, 6}, table_b = {5, 8, 7, 0, 10, 11, 12};

  // Two sequences name one setting. Two blocks are saved after the rows have filled them.
  StepBatch prompts;
  prompts.AddRows({.sequence = 1, .first_logits = 384}, tokens.first(385), {}, table_a, &setting);
  prompts.AddRows({.sequence = 2, .first_logits = 384}, tokens.last(385), {}, table_b, &setting);
  prompts.rows[1].sparsity = 0;
  prompts.sparsity.pop_back();
  prompts.ops_after = {{.kind = KvOpKind::kSave, .area = KvArea::kWarm, .block = 1, .slot = 3},
                       {.kind = KvOpKind::kSave, .area = KvArea::kWarm, .block = 4, .slot = 0}};
  const kernels::SparsityCounters first = Run(prompts);
  EXPECT_GT(first.reused, first.selections / 2);
  EXPECT_GT(first.missed.count(), 0);

  // The copies are restored to other blocks, which still have no key summaries.
  StepBatch restore;
  restore.ops_before = {{.kind = KvOpKind::kRestore, .area = KvArea::kWarm, .block = 16, .slot = 3},
                        {.kind = KvOpKind::kRestore, .area = KvArea::kWarm, .block = 17, .slot = 0}};
  const uint64_t empty = Checksum(16);
  Run(restore);
  const uint64_t restored = Checksum(16);
  EXPECT_NE(restored, empty);
  EXPECT_NE(restored, Checksum(1)) << "warm blocks are rounded";

  // Position 385 of each sequence reads the choice that the batch of the prompts made at 384.
  StepBatch next;
  next.ops_before = {{.kind = KvOpKind::kBuildSummary, .block = 16},
                     {.kind = KvOpKind::kBuildSummary, .block = 17}};
  table_a[1] = 16;
  table_a[2] = 17;
  next.AddRows({.sequence = 1, .start = 385}, tokens.subspan(385, 1), {}, table_a, &setting);
  next.AddRows({.sequence = 2, .start = 385}, tokens.first(1), {}, table_b, &setting);
  next.ops_after = {{.kind = KvOpKind::kCopy, .block = 18, .from = 16, .tokens = 64},
                    {.kind = KvOpKind::kBuildSummary, .block = 18}};
  const kernels::SparsityCounters second = Run(next);
  EXPECT_NE(Checksum(16), restored) << "the block has key summaries now";
  EXPECT_EQ(Checksum(18), Checksum(16));
  EXPECT_EQ(second.reused - first.reused, second.selections - first.selections);
  EXPECT_EQ(second.rechosen, 0);

  // An executor releases the choices of an ended sequence, and a later row makes its own.
  StepBatch last;
  last.ended = {1};
  last.AddRows({.sequence = 1, .start = 386}, tokens.subspan(386, 1), {}, table_a, &setting);
  last.AddRows({.sequence = 2, .start = 386}, tokens.subspan(1, 1), {}, table_b, &setting);
  const kernels::SparsityCounters third = Run(last);
  EXPECT_GT(third.rechosen, 0);
  EXPECT_EQ(third.rechosen, third.reused - second.reused) << "half of the new selections";
}

INSTANTIATE_TEST_SUITE_P(Models, StepBatchGoldenTest,
                         testing::Values("qwen3-moe-norm-tied", "deepseek-v3-mtp"),
                         [](const auto& info) { return models::TestName(info.param); });

}  // namespace
}  // namespace moesaic::engine
