// Tests block-sparse attention on every instruction set that this processor has.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "base/round.h"
#include "kernels/block_sparsity.h"
#include "kernels/impl_list.h"
#include "kernels/kv_layer.h"
#include "kernels/sketch.h"
#include "kernels/test_context.h"

namespace moesaic::kernels {
namespace {

using tensor::DType;

struct ModelShape {
  const char* name;
  int heads, kv_heads, key_dim, value_dim;
  bool shared;
  bool sketches = true;
};
constexpr ModelShape kModelShapes[] = {{"gqa64", 9, 3, 64, 64, false},
                                       {"mqa_odd", 7, 1, 40, 24, false},
                                       {"mla_tiny", 40, 1, 48, 32, true},
                                       {"boxes", 4, 2, 24, 16, false, false}};
constexpr DType kTypes[] = {DType::kF32, DType::kBF16, DType::kI8};

// A sequence of `context` tokens, written and summarized in chunks, with queries for each token.
class Sequence {
 public:
  Sequence(const ExecContext& ctx, const ModelShape& shape, DType dtype, int context, int chunk, int seed)
      : shape_(shape) {
    std::mt19937 rng(seed);
    const int blocks = base::CeilDiv(context, kKvBlockTokens);
    layer = LayOutKv(dtype, shape.kv_heads, shape.key_dim, shape.value_dim, shape.shared, shape.sketches);
    layer.block_stride += 64;
    layer.key_summary_stride += 64;
    memory_.assign(blocks * layer.block_stride, std::byte{0xff});
    summaries_.assign(blocks * layer.key_summary_stride, std::byte{0xff});
    layer.base = memory_.data();
    layer.key_summaries = summaries_.data();
    table.resize(blocks);
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), rng);
    queries_ = RandomValues(&rng, size_t(context) * shape.heads * shape.key_dim, 2);
    std::vector<float> k = RandomValues(&rng, size_t(context) * shape.kv_heads * shape.key_dim, 1);
    const std::vector<float> v = RandomValues(&rng, size_t(context) * shape.kv_heads * shape.value_dim, 1);
    // The keys of a block share a random direction, so that choices differ from chance.
    const std::vector<float> themes =
        RandomValues(&rng, size_t(blocks) * shape.kv_heads * shape.key_dim, 1.5F);
    const size_t row = size_t(shape.kv_heads) * shape.key_dim;
    for (size_t i = 0; i < k.size(); ++i) k[i] += themes[i / row / kKvBlockTokens * row + i % row];
    for (int start = 0; start < context; start += chunk) {
      const SequenceSlice slice = {table.data(), start, std::min(chunk, context - start), start};
      KvWrite(ctx, {layer,
                    k.data(),
                    shape.shared ? nullptr : v.data(),
                    static_cast<int64_t>(row),
                    int64_t{shape.kv_heads} * shape.value_dim,
                    {&slice, 1}});
      BuildKeySummaries(ctx, {layer, {&slice, 1}});
    }
  }

  const std::byte* Summary(int block) const {
    return layer.key_summaries + table[block] * layer.key_summary_stride;
  }

  // Called with the slices that attention reads next.
  using Fetch = std::function<void(std::span<const SequenceSlice>)>;

  // Returns the outputs of rows [start, start + count).
  std::vector<float> Attend(const ExecContext& ctx, int start, int count, const RowSparsity* sparsity,
                            const Fetch& fetch = {}) const {
    return AttendAll(ctx, {this}, {{start, count}}, sparsity, fetch);
  }
  static std::vector<float> AttendAll(const ExecContext& ctx, const std::vector<const Sequence*>& sequences,
                                      const std::vector<std::pair<int, int>>& parts,
                                      const RowSparsity* sparsity, const Fetch& fetch = {}) {
    const ModelShape& shape = sequences[0]->shape_;
    const int64_t q_row = int64_t{shape.heads} * shape.key_dim,
                  out_row = int64_t{shape.heads} * shape.value_dim;
    std::vector<SequenceSlice> slices;
    std::vector<float> q;
    int row = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      const auto [start, count] = parts[i];
      slices.push_back({sequences[i]->table.data(), start, count, row, sparsity});
      row += count;
      const auto from = sequences[i]->queries_.begin() + start * q_row;
      q.insert(q.end(), from, from + count * q_row);
    }
    std::vector<float> out(row * out_row, 7);
    // Sequences of a batch share one pool of blocks.
    SparseAttentionPass pass(
        ctx, {sequences[0]->layer, q.data(), q_row, out.data(), out_row, shape.heads, 0.3F, slices});
    while (pass.ChooseBlocks()) {
      if (fetch) fetch(pass.reads());
      pass.AttendChosen();
    }
    return out;
  }

  KvLayer layer;
  std::vector<int32_t> table;

 private:
  ModelShape shape_;
  std::vector<std::byte> memory_, summaries_;
  std::vector<float> queries_;
};

class SparseAttentionTest : public testing::TestWithParam<runtime::Isa> {
 protected:
  TestContext test_{GetParam(), 2};
};

bool SameBits(const float* a, const float* b, size_t count) {
  return std::memcmp(a, b, count * sizeof(float)) == 0;
}

TEST_P(SparseAttentionTest, WholeBudgetIsDenseToTheBit) {
  constexpr int kContext = 700;
  for (const ModelShape& shape : kModelShapes) {
    for (const DType dtype : kTypes) {
      if (GetParam() == runtime::Isa::kRef && dtype != DType::kI8)
        continue;  // nothing new in these, but slow
      const Sequence sequence(test_.context(), shape, dtype, kContext, 100, 1);
      const std::vector<float> dense = sequence.Attend(test_.context(), 0, kContext, nullptr);
      const RowSparsity whole = {.settings = {.budget_blocks = 11}};
      EXPECT_EQ(sequence.Attend(test_.context(), 0, kContext, &whole), dense) << shape.name;
      SparsityCounters counters;
      const RowSparsity sparse = {.settings = {.budget_blocks = 4}, .counters = &counters};
      EXPECT_NE(sequence.Attend(test_.context(), 0, kContext, &sparse), dense) << shape.name;
      EXPECT_EQ(counters.selections, int64_t{shape.kv_heads} * (kContext - 4 * kKvBlockTokens));
      EXPECT_EQ(counters.blocks_read, 4 * counters.selections);
    }
  }
  EXPECT_EQ(test_.scratch_mark(), 0U);
}

TEST_P(SparseAttentionTest, RowsBeforeTheFirstPositionAreDense) {
  constexpr int kContext = 700;
  const Sequence sequence(test_.context(), kModelShapes[0], DType::kBF16, kContext, 700, 2);
  const std::vector<float> dense = sequence.Attend(test_.context(), 0, kContext, nullptr);
  const RowSparsity late = {.settings = {.budget_blocks = 4, .first_position = 601}};
  const std::vector<float> out = sequence.Attend(test_.context(), 0, kContext, &late);
  const size_t row = size_t(kModelShapes[0].heads) * kModelShapes[0].value_dim;
  EXPECT_TRUE(SameBits(out.data(), dense.data(), 601 * row));
  for (int position = 601; position < kContext; ++position) {
    EXPECT_FALSE(SameBits(&out[position * row], &dense[position * row], row)) << position;
  }
}

// Rows in chunks, alone, after drafts and in batches choose the same blocks.
TEST_P(SparseAttentionTest, BitsDependOnTheRowAlone) {
  constexpr int kContext = 900;
  const RowSparsity sparsity = {.settings = {.budget_blocks = 5, .first_position = 333}};
  for (const ModelShape& shape : kModelShapes) {
    for (const DType dtype : kTypes) {
      if (GetParam() == runtime::Isa::kRef && dtype != DType::kI8)
        continue;  // nothing new in these, but slow
      const Sequence sequence(test_.context(), shape, dtype, kContext, 64, 3);
      const size_t row = size_t(shape.heads) * shape.value_dim;
      const std::vector<float> whole = sequence.Attend(test_.context(), 0, kContext, &sparsity);
      for (const auto& [start, count] : std::vector<std::pair<int, int>>{
               {899, 1}, {320, 1}, {333, 1}, {300, 64}, {511, 2}, {512, 1}, {640, 16}, {639, 130}}) {
        for (const int threads : {1, 3}) {
          TestContext other(GetParam(), threads);
          const std::vector<float> alone = sequence.Attend(other.context(), start, count, &sparsity);
          EXPECT_TRUE(SameBits(alone.data(), &whole[start * row], count * row)) << shape.name << " " << start;
          const std::vector<float> batch =
              Sequence::AttendAll(other.context(), {&sequence, &sequence, &sequence},
                                  {{700, 3}, {start, count}, {10, 5}}, &sparsity);
          EXPECT_TRUE(SameBits(&batch[3 * row], &whole[start * row], count * row))
              << shape.name << " " << start;
        }
      }
    }
  }
}

// Rows read the choice of the first row of their group, for any division of rows into steps.
TEST_P(SparseAttentionTest, RowsOfAGroupShareTheFirstRowsChoice) {
  for (const int reuse : {1, 2, 9, 63, 64}) {
    const RowSparsity sparsity = {.settings = {.budget_blocks = 5, .reuse = reuse}};
    for (int position = 640; position < 800; ++position) {
      const int end = sparsity.settings.GroupEnd(position);
      EXPECT_EQ(sparsity.settings.ChooserOf(end), end);
      EXPECT_EQ(sparsity.settings.ChooserOf(end - 1), sparsity.settings.ChooserOf(position));
    }
  }
  constexpr int kContext = 900, kFirst = 606;
  for (const ModelShape& shape : kModelShapes) {
    if (GetParam() == runtime::Isa::kRef && shape.shared) continue;  // slow
    const Sequence sequence(test_.context(), shape, DType::kBF16, kContext, 64, 3);
    const size_t row = size_t(shape.heads) * shape.value_dim;
    const RowSparsity each = {.settings = {.budget_blocks = 5, .first_position = kFirst}};
    const std::vector<float> alone = sequence.Attend(test_.context(), 0, kContext, &each);
    for (const int reuse : {9, 64}) {
      SparsityCounters counters;
      KeptChoices kept(1, shape.kv_heads, 15 / reuse + 3);
      RowSparsity sparsity = {
          .settings = {.budget_blocks = 5, .first_position = kFirst, .reuse = reuse, .audit_every = 7},
          .kept = &kept,
          .counters = &counters};
      const std::vector<float> whole = sequence.Attend(test_.context(), 0, kContext, &sparsity);
      EXPECT_EQ(counters.selections, int64_t{shape.kv_heads} * (kContext - kFirst));
      int64_t groups = 0, different = 0;
      for (int position = kFirst; position < kContext; ++position) {
        const bool chooses = sparsity.settings.ChooserOf(position) == position;
        groups += chooses;
        const bool same = SameBits(&whole[position * row], &alone[position * row], row);
        if (chooses) {
          EXPECT_TRUE(same) << position;
        }
        different += same ? 0 : 1;
      }
      EXPECT_EQ(counters.selections - counters.reused, shape.kv_heads * groups);
      EXPECT_GT(different, 0) << "some rows would have chosen other blocks";
      // Single tokens, steps with refused drafts, and rows that are computed again from a block on.
      KeptChoices others(1, shape.kv_heads, 15 / reuse + 3);
      sparsity.kept = &others;
      for (int position = kFirst - 3; position < kContext; ++position) {
        const int count = std::min(position % 3 == 0 ? 16 : 1, kContext - position);
        const std::vector<float> out = sequence.Attend(test_.context(), position, count, &sparsity);
        ASSERT_TRUE(SameBits(out.data(), &whole[position * row], count * row)) << position;
      }
      EXPECT_EQ(counters.rechosen, 0);
      const std::vector<float> again = sequence.Attend(test_.context(), 640, 100, &sparsity);
      EXPECT_TRUE(SameBits(again.data(), &whole[640 * row], 100 * row));
      KeptChoices none(1, shape.kv_heads, 3);
      sparsity.kept = &none;
      counters = {};
      sequence.Attend(test_.context(), 643, 100, &sparsity);
      EXPECT_EQ(counters.rechosen, shape.kv_heads) << "the first row's chooser";
    }
  }
}

// Overwrites all full blocks except the last, and restores each one when it is fetched.
class Elsewhere {
 public:
  explicit Elsewhere(Sequence& sequence)
      : sequence_(sequence), absent_(sequence.table.size() - 2, true), kept_(absent_.size()) {
    for (size_t i = 0; i < absent_.size(); ++i) {
      std::byte* block = sequence.layer.base + sequence.table[i] * sequence.layer.block_stride;
      kept_[i].assign(block, block + sequence.layer.block_stride);
      std::fill_n(block, kept_[i].size(), std::byte{0xff});
    }
  }
  void Fetch(std::span<const SequenceSlice> slices) {
    for (const SequenceSlice& slice : slices) {
      for (int i = 0; i * kKvBlockTokens < slice.start + slice.count; ++i) Bring(slice.block_table[i]);
    }
  }
  int absent() const { return static_cast<int>(std::count(absent_.begin(), absent_.end(), true)); }

 private:
  void Bring(int32_t number) {
    const auto i = static_cast<size_t>(std::ranges::find(sequence_.table, number) - sequence_.table.begin());
    if (i >= absent_.size() || !absent_[i]) return;
    absent_[i] = false;
    std::ranges::copy(kept_[i], sequence_.layer.base + number * sequence_.layer.block_stride);
  }
  Sequence& sequence_;
  std::vector<bool> absent_;
  std::vector<std::vector<std::byte>> kept_;
};

TEST_P(SparseAttentionTest, BlocksAreFetchedBeforeTheyAreRead) {
  const auto fetch = [](Elsewhere& source) {
    return [&source](std::span<const SequenceSlice> slices) { source.Fetch(slices); };
  };
  constexpr int kContext = 2000, kLast = 1985;
  for (const ModelShape& shape : kModelShapes) {
    for (const DType dtype : kTypes) {
      if (GetParam() == runtime::Isa::kRef && dtype != DType::kI8) continue;
      for (const int audit_every : {0, 2}) {
        Sequence sequence(test_.context(), shape, dtype, kContext, 500, 9);
        SparsityCounters counters;
        const RowSparsity sparsity = {.settings = {.budget_blocks = 5, .audit_every = audit_every},
                                      .counters = &counters};
        const std::vector<float> wanted = sequence.Attend(test_.context(), kLast, 3, &sparsity);
        const double missed = counters.missed.sum;
        counters = {};
        Elsewhere source(sequence);
        const int all = source.absent();
        EXPECT_EQ(sequence.Attend(test_.context(), kLast, 3, &sparsity, fetch(source)), wanted) << shape.name;
        EXPECT_EQ(counters.missed.sum, missed) << shape.name;
        if (audit_every == 0) {
          EXPECT_GT(source.absent(), all / 4) << shape.name;
        } else {
          EXPECT_EQ(source.absent(), 0) << shape.name << ": audits read all blocks";
        }
      }
      // Rows that choose after dense rows, and a dense layer.
      Sequence sequence(test_.context(), shape, dtype, kContext, 500, 9);
      const RowSparsity late = {.settings = {.budget_blocks = 5, .first_position = kLast + 1}};
      const std::vector<float> wanted = sequence.Attend(test_.context(), kLast, 3, &late);
      Elsewhere source(sequence);
      EXPECT_EQ(sequence.Attend(test_.context(), kLast, 3, &late, fetch(source)), wanted);
      EXPECT_EQ(source.absent(), 0);
      sequence.layer.key_summaries = nullptr;
      EXPECT_EQ(sequence.Attend(test_.context(), kLast, 3, nullptr),
                sequence.Attend(test_.context(), kLast, 3, &late));
    }
  }
}

TEST_P(SparseAttentionTest, KeySummariesDependOnFullBlocksAlone) {
  const ModelShape& shape = kModelShapes[0];
  for (const DType dtype : kTypes) {
    const Sequence whole(test_.context(), shape, dtype, 200, 200, 4);
    const Sequence chunks(test_.context(), shape, dtype, 200, 7, 4);
    const size_t bytes = shape.kv_heads * KeySummaryBytes(shape.key_dim, shape.key_dim, shape.sketches);
    for (int block = 0; block < 3; ++block) {
      EXPECT_EQ(std::memcmp(whole.Summary(block), chunks.Summary(block), bytes), 0);
      EXPECT_NE(whole.Summary(block)[0], std::byte{0xff});
    }
    EXPECT_EQ(std::count(whole.Summary(3), whole.Summary(3) + bytes, std::byte{0xff}),
              static_cast<int>(bytes));
  }
}

// The error of the output is at most that of the omitted weights: values are in [-1, 1] with a margin, and
// weights differ by `missed` in total.
TEST_P(SparseAttentionTest, AuditsMeasureTheOmittedMass) {
  constexpr int kContext = 1500;
  for (const ModelShape& shape : kModelShapes) {
    const Sequence sequence(test_.context(), shape, DType::kF32, kContext, 500, 5);
    for (const int position : {700, 1023, 1024, 1499}) {
      SparsityCounters counters;
      const RowSparsity sparsity = {.settings = {.budget_blocks = 8, .audit_every = 1},
                                    .counters = &counters};
      const std::vector<float> dense = sequence.Attend(test_.context(), position, 1, nullptr);
      const std::vector<float> out = sequence.Attend(test_.context(), position, 1, &sparsity);
      const int64_t audited = counters.missed.count();
      EXPECT_EQ(audited, shape.heads / shape.kv_heads) << "one KV head of a row is audited";
      EXPECT_GT(counters.missed.sum, 0);
      EXPECT_EQ(counters.blocks_read, 8 * shape.kv_heads);
      EXPECT_EQ(counters.blocks_all, (position / 64 + 1) * shape.kv_heads);
      // KV head 0 is audited. All of its query heads together missed `sum`.
      const float largest = shape.shared ? 2.5F : 1;
      for (int i = 0; i < shape.heads / shape.kv_heads * shape.value_dim; ++i) {
        EXPECT_LE(std::abs(out[i] - dense[i]), 2 * largest * counters.missed.sum + 1e-5);
      }
    }
  }
}

// Twenty workers score three rows, or one. The blocks of a KV head have three parts, of which a short row has
// only the first, and 40 query heads have three groups. Another worker finishes last and chooses each time.
TEST_P(SparseAttentionTest, ManyWorkersGiveTheBitsOfOneForFewRows) {
  constexpr int kContext = 8385;  // 131 blocks and the current one
  TestContext one(GetParam(), 1), many(GetParam(), 20);
  for (ModelShape shape : kModelShapes) {
    for (const bool sketches : {false, true}) {
      if (GetParam() == runtime::Isa::kRef && sketches) continue;  // slow
      shape.sketches = sketches;
      const Sequence sequence(test_.context(), shape, DType::kBF16, kContext, kContext, 5);
      const RowSparsity sparsity = {.settings = {.budget_blocks = 40}};
      const std::vector<const Sequence*> twice(2, &sequence);
      const std::vector<std::pair<int, int>> parts = {{3000, 1}, {kContext - 2, 2}};
      const std::vector<float> last = sequence.Attend(one.context(), kContext - 1, 1, &sparsity);
      const std::vector<float> all = Sequence::AttendAll(one.context(), twice, parts, &sparsity);
      for (int round = 0; round < 20; ++round) {
        ASSERT_EQ(sequence.Attend(many.context(), kContext - 1, 1, &sparsity), last)
            << shape.name << ", sketches " << sketches << ", round " << round;
        ASSERT_EQ(Sequence::AttendAll(many.context(), twice, parts, &sparsity), all)
            << shape.name << ", sketches " << sketches << ", round " << round;
      }
    }
  }
}

// A KV head has more query heads than one call of a kernel supports.
TEST_P(SparseAttentionTest, SupportsMoreHeadsThanOneCall) {
  constexpr int kContext = 1500;
  const ModelShape shape = {"many_heads", kMaxEstimateRows + 8, 1, 16, 16, false, false};
  TestContext many(GetParam(), 5);
  const Sequence sequence(test_.context(), shape, DType::kBF16, kContext, kContext, 5);
  SparsityCounters counters;
  const RowSparsity sparsity = {.settings = {.budget_blocks = 8, .audit_every = 1}, .counters = &counters};
  const std::vector<float> alone = sequence.Attend(test_.context(), kContext - 1, 1, &sparsity);
  EXPECT_EQ(sequence.Attend(many.context(), kContext - 1, 1, &sparsity), alone);
  EXPECT_EQ(counters.missed.count(), 2 * shape.heads);
  EXPECT_LT(counters.missed.sum, 0.9 * 2 * shape.heads) << "blocks that matter to all heads are chosen";
  const RowSparsity all = {.settings = {.budget_blocks = kContext / kKvBlockTokens + 1}};
  EXPECT_EQ(sequence.Attend(test_.context(), kContext - 1, 1, &all),
            sequence.Attend(test_.context(), kContext - 1, 1, nullptr));
}

// A block whose keys are not finite is read, so that the output is not finite either, as with dense
// attention.
TEST_P(SparseAttentionTest, BlocksWithNaNAreRead) {
  const ModelShape& shape = kModelShapes[1];
  Sequence sequence(test_.context(), shape, DType::kF32, 1000, 1000, 6);
  auto* keys =
      reinterpret_cast<float*>(sequence.layer.base + sequence.table[7] * sequence.layer.block_stride);
  keys[33 * shape.key_dim + 5] = std::numeric_limits<float>::quiet_NaN();
  const SequenceSlice slice = {sequence.table.data(), 7 * 64, 64, 0};
  BuildKeySummaries(test_.context(), {sequence.layer, {&slice, 1}});
  const RowSparsity sparsity = {.settings = {.budget_blocks = 4}};
  for (const float x : sequence.Attend(test_.context(), 999, 1, &sparsity)) EXPECT_FALSE(std::isfinite(x));
}

// More such blocks than the budget are not all read, and the output is not finite.
TEST_P(SparseAttentionTest, OutputIsNotFiniteIfMoreBlocksThanTheBudgetHaveNaN) {
  const ModelShape& shape = kModelShapes[1];
  Sequence sequence(test_.context(), shape, DType::kF32, 1000, 1000, 6);
  for (int block = 2; block < 8; ++block) {
    auto* keys =
        reinterpret_cast<float*>(sequence.layer.base + sequence.table[block] * sequence.layer.block_stride);
    keys[33 * shape.key_dim + 5] = std::numeric_limits<float>::quiet_NaN();
    const SequenceSlice slice = {sequence.table.data(), block * 64, 64, 0};
    BuildKeySummaries(test_.context(), {sequence.layer, {&slice, 1}});
  }
  const RowSparsity sparsity = {.settings = {.budget_blocks = 4}};
  for (const float x : sequence.Attend(test_.context(), 999, 1, &sparsity)) EXPECT_FALSE(std::isfinite(x));
}

// Instruction sets that some kernel of the choice or of attention needs.
std::vector<runtime::Isa> SparseIsas() {
  std::set<runtime::Isa> found;
  const auto add = [&](const auto& impls) {
    for (const auto& impl : impls) {
      if (runtime::DetectCpu().Has(impl.needs)) found.insert(impl.needs);
    }
  };
  add(AttentionImpls(DType::kBF16));
  add(KeySummaryImpls());
  add(KeySummaryEstimatesImpls());
  add(SketchScoresImpls());
  return {found.begin(), found.end()};
}
INSTANTIATE_TEST_SUITE_P(Host, SparseAttentionTest, testing::ValuesIn(SparseIsas()), IsaTestName);

}  // namespace
}  // namespace moesaic::kernels
