// Batches survive serialization, and a second executor that runs the parsed batches computes the same
// results.
#include "engine/step_batch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/fake_model.h"
#include "engine/local_executor.h"
#include "kernels/kernel_table.h"

namespace moesaic::engine {
namespace {

using cache::KvArea;
using cache::KvOpKind;
using testing::HasSubstr;

std::span<const std::byte> Bytes(const std::string& text) { return std::as_bytes(std::span(text)); }

StepBatch Example() {
  StepBatch batch = {.want_hidden = true, .count_experts = true, .divides = false, .candidates = 5};
  batch.ops_before = {{.kind = KvOpKind::kSave, .area = KvArea::kWarm, .block = 3, .slot = 1},
                      {.kind = KvOpKind::kCopy, .block = 1, .from = 2, .tokens = 40},
                      {.kind = KvOpKind::kLoad, .block = 4, .record = 17, .load = uint64_t{1} << 60}};
  batch.ops_after = {{.kind = KvOpKind::kBuildSummary, .block = 5}};
  batch.ended = {7, 9};
  batch.joint = {.number = 3, .parts = 2, .most_rows = 40, .move = 1};
  const std::vector<int32_t> tokens = {1, 2, 3}, drafts = {4}, table = {5, 6};
  const kernels::SparsitySettings setting = {
      .budget_blocks = 8, .first_position = 3, .reuse = 4, .audit_every = 5};
  const RowNeeds needs = {.temperature = 0.5F, .normalizer = true};
  batch.AddRows({.sequence = 11, .start = 62, .first_logits = 2, .needs = needs}, tokens, drafts, table,
                &setting);
  batch.AddRows({.sequence = 12, .first_logits = 1}, drafts, {}, table);
  return batch;
}

TEST(StepBatchTest, ParsingRestoresTheSerializedBatch) {
  const StepBatch batch = Example();
  const std::string bytes = Serialize(batch);
  const StatusOr<StepBatch> parsed = ParseStepBatch(Bytes(bytes));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(Serialize(*parsed), bytes);
  EXPECT_EQ(parsed->candidates, batch.candidates);
  EXPECT_EQ(parsed->ops_before, batch.ops_before);
  EXPECT_EQ(parsed->ops_after, batch.ops_after);
  EXPECT_EQ(parsed->ended, batch.ended);
  EXPECT_EQ(parsed->joint, batch.joint);
  EXPECT_EQ(parsed->tokens, batch.tokens);
  EXPECT_EQ(parsed->block_tables, batch.block_tables);
  EXPECT_EQ(parsed->rows, batch.rows);
  EXPECT_TRUE(parsed->want_hidden && parsed->count_experts && !parsed->want_routes && !parsed->divides);
  ASSERT_EQ(parsed->sparsity.size(), 1U);
  EXPECT_EQ(parsed->sparsity[0].budget_blocks, 8);
  EXPECT_EQ(parsed->sparsity[0].first_position, 3);
  EXPECT_EQ(parsed->sparsity[0].reuse, 4);
  EXPECT_EQ(parsed->sparsity[0].audit_every, 5);
}

TEST(StepBatchTest, TruncatedAndTrailingBytesAreRefused) {
  const std::string bytes = Serialize(Example());
  for (size_t size = 0; size < bytes.size(); ++size) {
    const auto cut = ParseStepBatch(Bytes(bytes).first(size));
    EXPECT_EQ(cut.status().code(), StatusCode::kInvalidArgument) << size;
  }
  EXPECT_THAT(Message(ParseStepBatch(Bytes(bytes + "x")).status()), HasSubstr("1 bytes follow the batch"));
}

TEST(StepBatchTest, MalformedBytesAreRefusedWithAReason) {
  const std::string good = Serialize(Example());
  const auto message = [&](size_t at, char value) {
    std::string bytes = good;
    bytes[at] = value;
    return Message(ParseStepBatch(Bytes(bytes)).status());
  };
  EXPECT_THAT(message(0, 'x'), HasSubstr("the bytes are no step batch"));
  EXPECT_THAT(message(4, 9), HasSubstr("this build reads version 4, found 9"));
  EXPECT_THAT(message(8, 2), HasSubstr("kind must be in [0, 2), found 2"));
  EXPECT_THAT(message(9, 2), HasSubstr("want_hidden must be 0 or 1, found 2"));
  EXPECT_THAT(message(18, 120), HasSubstr("ops_before has"));
  EXPECT_THAT(message(25, 100), HasSubstr("kind of an operation must be in [0, 10), found 100"));
}

TEST(StepBatchTest, NumbersOutOfRangeAreRefusedWithAReason) {
  StepLimits limits = {.blocks = 8,
                       .swap_slots = 2,
                       .warm_slots = 2,
                       .layers = 3,
                       .vocab_size = 100,
                       .hidden_size = 4,
                       .disk = true};
  ASSERT_TRUE(CheckBatch(Example(), limits).ok()) << CheckBatch(Example(), limits);
  const auto message = [&](const auto& change) {
    StepBatch batch = Example();
    change(batch);
    return Message(CheckBatch(batch, limits));
  };
  EXPECT_THAT(message([](StepBatch& b) { b.ops_before[0].block = 8; }), HasSubstr("block outside [0, 8): 8"));
  EXPECT_THAT(message([](StepBatch& b) { b.candidates = -1; }), HasSubstr("at least 0, found -1"));
  EXPECT_THAT(message([](StepBatch& b) { b.joint.parts = -1; }), HasSubstr("joint step 3 has -1 parts"));
  EXPECT_THAT(message([](StepBatch& b) { b.rows[0].needs.temperature = NAN; }),
              HasSubstr("temperature must be at least 0"));
  EXPECT_THAT(message([](StepBatch& b) { b.ops_before[0].slot = 2; }), HasSubstr("slot outside [0, 2): 2"));
  EXPECT_THAT(message([](StepBatch& b) { b.ops_before[1].tokens = 65; }), HasSubstr("copies 65 tokens"));
  EXPECT_THAT(message([](StepBatch& b) { b.ops_before[1].from = b.ops_before[1].block; }),
              HasSubstr("is copied to itself"));
  for (const auto kind : {cache::KvOpKind::kLoad, cache::KvOpKind::kCancelLoad, cache::KvOpKind::kStore,
                          cache::KvOpKind::kAttach}) {
    StepBatch batch = Example();
    batch.ops_before.push_back({.kind = kind});
    EXPECT_TRUE(CheckBatch(batch, limits).ok()) << static_cast<int>(kind);
    StepLimits without_disk = limits;
    without_disk.disk = false;
    EXPECT_THAT(Message(CheckBatch(batch, without_disk)), HasSubstr("needs a disk tier"));
  }
  EXPECT_THAT(message([](StepBatch& b) { b.ops_after[0].layer = -1; }),
              HasSubstr("layer outside [0, 3): -1"));
  EXPECT_THAT(message([](StepBatch& b) { b.tokens[1] = 100; }), HasSubstr("vocabulary [0, 100): 100"));
  EXPECT_THAT(message([](StepBatch& b) { b.block_tables[0] = -1; }), HasSubstr("block outside [0, 8): -1"));
  EXPECT_THAT(message([](StepBatch& b) { b.rows[1].count = 2; }), HasSubstr("are not among 5 tokens"));
  EXPECT_THAT(message([](StepBatch& b) { b.rows[1].first_token = 3; }), HasSubstr("rows begin at token 4"));
  EXPECT_THAT(message([](StepBatch& b) { b.rows.pop_back(); }), HasSubstr("4 rows have 5 tokens"));
  EXPECT_THAT(message([](StepBatch& b) { b.rows[0].start = 127; }),
              HasSubstr("do not fit a table of 2 blocks"));
  EXPECT_THAT(message([](StepBatch& b) { b.rows[0].blocks = INT32_MAX; }), HasSubstr("block table"));
  EXPECT_THAT(message([](StepBatch& b) { b.rows[0].first_logits = 5; }), HasSubstr("logits from row 5 of 4"));
  EXPECT_THAT(message([](StepBatch& b) { b.rows[1].sparsity = 1; }), HasSubstr("setting 1 of 1"));
  EXPECT_THAT(message([](StepBatch& b) { b.sparsity[0].reuse = 0; }), HasSubstr("out of range"));
  EXPECT_THAT(message([](StepBatch& b) { b.kind = StepKind::kMtp; }),
              HasSubstr("20 hidden values are expected, found 0"));
}

// Runs each batch unchanged on one executor and from its bytes on another one.
class TwoExecutors {
 public:
  TwoExecutors() {
    for (int i = 0; i < 2; ++i) {
      stores_[i] = *cache::KvStore::Create(
          {.layout = Layout(), .blocks = kBlocks, .swap_slots = 2, .warm_slots = 2}, *threads_);
      executors_[i] = std::make_unique<LocalExecutor>(models_[i], kernels_, *threads_, *stores_[i], 0);
    }
  }

  // Returns the logits of the batch.
  std::vector<float> Run(const StepBatch& batch) {
    const StatusOr<StepBatch> parsed = ParseStepBatch(Bytes(Serialize(batch)));
    EXPECT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_TRUE(CheckBatch(*parsed, executors_[1]->limits()).ok())
        << CheckBatch(*parsed, executors_[1]->limits());
    const StatusOr<StepResult> here = executors_[0]->Run(batch), there = executors_[1]->Run(*parsed);
    EXPECT_TRUE(here.ok()) << here.status();
    EXPECT_TRUE(there.ok()) << there.status();
    EXPECT_TRUE(std::ranges::equal(here->logits, there->logits));
    EXPECT_TRUE(std::ranges::equal(here->hidden, there->hidden));
    for (int b = 0; b < kBlocks; ++b) EXPECT_EQ(stores_[0]->Checksum(b), stores_[1]->Checksum(b)) << b;
    hidden_.assign(here->hidden.begin(), here->hidden.end());
    return {here->logits.begin(), here->logits.end()};
  }
  const std::vector<float>& hidden() const { return hidden_; }

  static constexpr int kBlocks = 12;

 private:
  tensor::KvLayout Layout() const {
    const models::KvSpec& kv = models_[0].info().kv;
    return {.layers = kv.layers, .heads = kv.heads, .key_dim = kv.key_dim, .value_dim = kv.value_dim};
  }

  FakeModel models_[2] = {FakeModel(4096, FakeModel::kVocab, /*mtp=*/true),
                          FakeModel(4096, FakeModel::kVocab, /*mtp=*/true)};
  kernels::KernelTable kernels_;
  const std::unique_ptr<runtime::ThreadPool> threads_ =
      *runtime::ThreadPool::Create({.threads = 2, .pin = false});
  std::unique_ptr<cache::KvStore> stores_[2];
  std::unique_ptr<LocalExecutor> executors_[2];
  std::vector<float> hidden_;
};

std::vector<int32_t> RandomTokens(int count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % FakeModel::kVocab);
  return tokens;
}

TEST(StepBatchTest, ASecondExecutorComputesTheSameResultsFromBytes) {
  TwoExecutors both;
  const std::vector<int32_t> a = RandomTokens(150, 1), b = RandomTokens(70, 2);
  const std::vector<int32_t> table_a = {4, 2, 9}, table_b = {0, 7};
  StepBatch first;
  first.AddRows({.sequence = 1, .first_logits = 99}, std::span(a).first(100), {}, table_a);
  first.AddRows({.sequence = 2, .first_logits = 70}, b, {}, table_b);
  EXPECT_EQ(both.Run(first), FakeModel::LogitsAfter(std::span(a).first(100)));

  // b is swapped out and its blocks are overwritten by a sequence that continues a's first block.
  StepBatch second;
  second.want_hidden = true;
  second.ops_before = {{.kind = KvOpKind::kSave, .area = KvArea::kSwap, .block = 0, .slot = 1},
                       {.kind = KvOpKind::kSave, .area = KvArea::kSwap, .block = 7, .slot = 0},
                       {.kind = KvOpKind::kCopy, .block = 7, .from = 4, .tokens = 30}};
  std::vector<int32_t> c(a.begin(), a.begin() + 30);
  c.push_back(5);
  const std::vector<int32_t> table_c = {7};
  second.AddRows({.sequence = 1, .start = 100, .first_logits = 49}, std::span(a).subspan(100), {}, table_a);
  second.AddRows({.sequence = 3, .start = 30, .first_logits = 0}, std::span(c).last(1), {}, table_c);
  std::vector<float> expected = FakeModel::LogitsAfter(a);
  const std::vector<float> of_c = FakeModel::LogitsAfter(c);
  expected.insert(expected.end(), of_c.begin(), of_c.end());
  EXPECT_EQ(both.Run(second), expected);

  // b is swapped in to other blocks, and its next token is drafted by the MTP module.
  StepBatch third;
  third.ops_before = {{.kind = KvOpKind::kRestore, .area = KvArea::kSwap, .block = 11, .slot = 1},
                      {.kind = KvOpKind::kRestore, .area = KvArea::kSwap, .block = 3, .slot = 0}};
  third.want_hidden = true;
  const std::vector<int32_t> table_moved = {11, 3}, next = {8};
  std::vector<int32_t> longer = b;
  longer.push_back(8);
  third.AddRows({.sequence = 2, .start = 70, .first_logits = 0}, next, {}, table_moved);
  EXPECT_EQ(both.Run(third), FakeModel::LogitsAfter(longer));
  StepBatch draft = {.kind = StepKind::kMtp};
  draft.ops_before = {{.kind = KvOpKind::kClear, .block = 3, .layer = 2}};
  draft.hidden = both.hidden();
  const std::vector<int32_t> drawn = {9}, table_mtp = {3};
  draft.AddRows({.sequence = 2, .start = 70 - 64, .first_logits = 0}, drawn, {}, table_mtp);
  both.Run(draft);

  StepBatch none;
  none.ended = {1, 2, 3};
  EXPECT_TRUE(both.Run(none).empty()) << "a batch without rows only applies its operations";
}

}  // namespace
}  // namespace moesaic::engine
