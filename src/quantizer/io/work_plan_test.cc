#include "quantizer/io/work_plan.h"

#include <gmock/gmock.h>

#include <numeric>

namespace moesaic::quantizer {
namespace {

using ::testing::HasSubstr;

class WorkPlanTest : public ::testing::Test {
 protected:
  void Add(const std::string& name, int64_t n, int64_t k, int fused = -1) {
    items_.push_back({.name = name, .linear = true, .shape = {n, k}, .roundable = true, .fused = fused});
    forms_.push_back({true, tensor::DType::kBF16, 2 * n * k});
  }
  void Plan(Scheme scheme, int64_t shard_bytes = int64_t{1} << 40) {
    settings_.scheme = scheme;
    settings_.shard_bytes = shard_bytes;
    output_ = *PlanOutput(items_, forms_, settings_);
  }
  WorkPlan Cut(int64_t unit_bytes) const { return Cut(UnitSizes{.unit_bytes = unit_bytes}); }
  WorkPlan Cut(const UnitSizes& sizes) const { return CutWork(items_, forms_, output_, {}, sizes); }

  // Checks that every row of every item occurs once and in order, every output byte once, and that units have
  // one shard.
  void CheckWhole(const WorkPlan& plan) const {
    size_t item = 0;
    int64_t row = 0;
    for (const Piece& piece : plan.pieces) {
      EXPECT_EQ(piece.item, item);
      EXPECT_EQ(piece.first, row);
      EXPECT_EQ(piece.first % 128, 0);
      row += piece.rows;
      if (row < items_[item].shape[0]) continue;
      EXPECT_EQ(row, items_[item].shape[0]);
      ++item;
      row = 0;
    }
    EXPECT_EQ(item, items_.size());
    size_t piece = 0;
    int64_t bytes = 0;
    for (const IoUnit& unit : plan.units) {
      EXPECT_EQ(unit.first, piece);
      for (; piece < unit.end; ++piece) {
        EXPECT_EQ(output_.items[plan.pieces[piece].item].shard,
                  output_.items[plan.pieces[unit.first].item].shard);
      }
      EXPECT_LE(unit.source_bytes, unit.alone ? plan.alone_bytes : plan.source_bytes);
      EXPECT_LE(unit.output_bytes, unit.alone ? plan.alone_bytes : plan.output_bytes);
      bytes += unit.output_bytes;
    }
    EXPECT_EQ(piece, plan.pieces.size());
    int64_t expected = 0;
    for (const OutputItem& output : output_.items) expected += output.bytes();
    EXPECT_EQ(bytes, expected);
  }

  std::vector<ModelItem> items_;
  std::vector<SourceForm> forms_;
  OutputSettings settings_;
  OutputPlan output_;
};

TEST_F(WorkPlanTest, SplitsLargeMatricesAndGroupsSmallMatrices) {
  Add("a", 1000, 512);
  for (int e = 0; e < 40; ++e) Add("expert" + std::to_string(e), 64, 512);
  Add("z", 300, 512);
  for (const Scheme scheme : {Scheme::kW8A8, Scheme::kW4A16, Scheme::kFp8}) {
    Plan(scheme, 400'000);
    for (const int64_t unit_bytes :
         {int64_t{1}, int64_t{300'000}, int64_t{500'000}, int64_t{1'000'000}, int64_t{0}}) {
      const WorkPlan plan = Cut(unit_bytes);
      CheckWhole(plan);
      if (unit_bytes < 300'000) continue;
      for (const IoUnit& unit : plan.units) EXPECT_LE(unit.source_bytes + unit.output_bytes, unit_bytes);
    }
  }
  EXPECT_GT(Cut(300'000).units.size(), 10U);
}

// The group index of an act-order is read again for every piece.
TEST_F(WorkPlanTest, SharedTensorsAreCountedForEveryPiece) {
  Add("a", 1024, 65536);
  Plan(Scheme::kW8A8);
  const WorkPlan plain = Cut(1);
  forms_[0].bytes += 4 * 65536;
  forms_[0].whole_bytes = 4 * 65536;
  const WorkPlan plan = Cut(1);
  ASSERT_EQ(plan.units.size(), 8U);
  CheckWhole(plan);
  for (size_t i = 0; i < plan.units.size(); ++i) {
    EXPECT_EQ(plan.units[i].source_bytes, plain.units[i].source_bytes + 4 * 65536);
  }
}

TEST_F(WorkPlanTest, LinearsWithASharedScaleStayTogether) {
  Add("q", 512, 256, 0);
  Add("k", 256, 256, 0);
  Add("v", 256, 256, 0);
  Add("o", 256, 512);
  Plan(Scheme::kNvfp4);
  // Source and output of q, k and v, with some space for alignment, but not of o.
  const WorkPlan plan = Cut(int64_t{1024} * 256 * 2 * 3 / 2);
  CheckWhole(plan);
  ASSERT_EQ(plan.units.size(), 2U);
  EXPECT_EQ(plan.units[0].end, 3U);
  const WorkPlan small = Cut(1);  // too large for any unit: split like others
  CheckWhole(small);
  EXPECT_EQ(small.units.size(), 10U);
}

TEST_F(WorkPlanTest, LinearsWithASharedScaleGetAnExclusiveUnitIfTheyAreTooLarge) {
  Add("a", 256, 256);
  Add("gate", 1000, 512, 0);
  Add("up", 1000, 512, 0);
  Add("down", 512, 1008);
  Plan(Scheme::kNvfp4);
  // One of gate and up has 1.3 MB with its output. Both fit an exclusive unit of 3 MB.
  const WorkPlan whole = Cut({.unit_bytes = 1'500'000, .alone_bytes = 3'000'000});
  CheckWhole(whole);
  ASSERT_EQ(whole.units.size(), 3U);
  EXPECT_FALSE(whole.units[0].alone);
  EXPECT_TRUE(whole.units[1].alone);
  EXPECT_EQ(whole.units[1].end - whole.units[1].first, 2U);
  EXPECT_FALSE(whole.units[2].alone);
  EXPECT_LE(whole.alone_bytes, 3'000'000);
  EXPECT_GE(whole.buffer_bytes(), whole.alone_bytes);
  EXPECT_GE(whole.buffer_bytes(), 2 * (whole.source_bytes + whole.output_bytes));
  // The exclusive unit takes as many rows as fit; the rest is in ordinary units.
  for (const int64_t alone_bytes : {400'000, 700'000, 1'000'000, 2'000'000, 2'600'000}) {
    SCOPED_TRACE(alone_bytes);
    const WorkPlan part = Cut({.unit_bytes = 150'000, .alone_bytes = alone_bytes});
    CheckWhole(part);
    const auto alone = std::ranges::count(part.units, true, &IoUnit::alone);
    EXPECT_GE(alone, 2);  // q_a and kv_a or gate and up, and down
    EXPECT_LE(part.alone_bytes, alone_bytes);
    EXPECT_GT(part.alone_bytes, alone_bytes / 2);
  }
  EXPECT_EQ(Cut({.unit_bytes = 150'000, .alone_bytes = 100'000}).alone_bytes, 0);
}

TEST_F(WorkPlanTest, ReturnsTheRowsOutsideAUnit) {
  Add("a", 256, 256);
  Add("gate", 1000, 512, 0);
  Add("up", 1000, 512, 0);
  using Rows = std::pair<size_t, std::pair<int64_t, int64_t>>;
  const auto beside = [&](std::vector<Piece> pieces) {
    std::vector<Rows> rows;
    for (const Piece& piece : RowsBeside(items_, 1, 3, pieces)) {
      rows.push_back({piece.item, {piece.first, piece.rows}});
    }
    return rows;
  };
  EXPECT_EQ(FusedWith(items_, 0), std::pair(size_t{0}, size_t{1}));
  EXPECT_EQ(FusedWith(items_, 2), std::pair(size_t{1}, size_t{3}));
  EXPECT_TRUE(beside({{1, 0, 1000}, {2, 0, 1000}}).empty());
  EXPECT_EQ(beside({{1, 128, 872}, {2, 0, 256}}), (std::vector<Rows>{{1, {0, 128}}, {2, {256, 744}}}));
  EXPECT_EQ(beside({{2, 256, 128}}), (std::vector<Rows>{{1, {0, 1000}}, {2, {0, 256}}, {2, {384, 616}}}));
}

TEST_F(WorkPlanTest, UnitsFillButDoNotExceedTheMemory) {
  for (int e = 0; e < 100; ++e) Add("expert" + std::to_string(e), 256, 1024);
  Plan(Scheme::kW8A8);
  const int64_t least = Cut(1).bytes();
  for (const int64_t memory : {least, least * 2, least * 5}) {
    const StatusOr<UnitSizes> sizes = FitUnits(items_, forms_, output_, {}, memory);
    ASSERT_TRUE(sizes.ok()) << sizes.status();
    EXPECT_LE(Cut(*sizes).bytes(), memory);
  }
  const Status none = FitUnits(items_, forms_, output_, {}, least - 1).status();
  EXPECT_EQ(none.code(), StatusCode::kResourceExhausted);
  EXPECT_THAT(Message(none), HasSubstr(std::to_string(least) + " are needed"));
}

TEST_F(WorkPlanTest, ExclusiveUnitsFillButDoNotExceedTheMemory) {
  for (int e = 0; e < 20; ++e) Add("expert" + std::to_string(e), 256, 1024);
  Add("gate", 1024, 1024, 0);
  Add("up", 1024, 1024, 0);
  Plan(Scheme::kNvfp4);
  const WorkPlan smallest = Cut(1);
  // Gate and up have 4 MiB, and 1.1 MiB as NVFP4. Two units of that need 10.9 MB and an exclusive one 5.5 MB,
  // with alignment.
  struct {
    int64_t buffers;
    bool alone, whole;
  } const kCases[] = {{smallest.buffer_bytes(), false, false},
                      {2'000'000, true, false},
                      {4'000'000, true, false},
                      {5'800'000, true, true},
                      {8'000'000, true, true},
                      {16'000'000, false, true}};
  for (const auto& [buffers, alone, whole] : kCases) {
    SCOPED_TRACE(buffers);
    const int64_t memory = smallest.slab_bytes() + buffers;
    const StatusOr<UnitSizes> sizes = FitUnits(items_, forms_, output_, {}, memory);
    ASSERT_TRUE(sizes.ok()) << sizes.status();
    const WorkPlan plan = Cut(*sizes);
    CheckWhole(plan);
    EXPECT_LE(plan.bytes(), memory);
    EXPECT_LE(plan.alone_bytes, memory - plan.slab_bytes());
    if (alone) {
      EXPECT_GT(plan.alone_bytes, 0);
    }
    if (whole) {  // both in one unit
      const IoUnit& last = plan.units.back();
      EXPECT_EQ(last.alone, alone);
      EXPECT_GE(last.end - last.first, 2U);
      EXPECT_EQ(plan.pieces.back().rows, 1024);
    } else {
      EXPECT_LT(plan.pieces.back().rows, 1024);
    }
  }
}

TEST_F(WorkPlanTest, OffsetsOfScalesFollowTheRowsOfAPiece) {
  Add("a", 1000, 256);
  Plan(Scheme::kFp8);
  const std::vector<OutputTensor>& tensors = output_.items[0].tensors;
  const PieceTensor codes = PlaceOf(tensors[0], {0, 256, 744}), scales = PlaceOf(tensors[1], {0, 256, 744});
  EXPECT_EQ(codes.offset - tensors[0].offset, 256 * 256);
  EXPECT_EQ(codes.bytes, 744 * 256);
  EXPECT_EQ(scales.offset - tensors[1].offset, 2 * 2 * 4);  // rows of two f32 scales
  EXPECT_EQ(scales.bytes, 6 * 2 * 4);
}

}  // namespace
}  // namespace moesaic::quantizer
