#include "models/packed_slices.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace moesaic::models {
namespace {

using parallel::Range;
using tensor::PackedFormat;
using tensor::PackedMatrix;

constexpr int kOutputs = 80, kInputs = 768, kRecords = 3;

// Gate and down of some experts: rows of the first, columns of the second.
RegionPlan PlanOf(PackedFormat format, Range outputs, Range inputs, std::vector<int32_t> records) {
  const PartDecl whole = {.module = "experts.{}", .module_out = kOutputs, .module_in = kInputs};
  PartDecl gate = whole, down = whole;
  gate.first_row = outputs.first, gate.n = outputs.count, gate.k = kInputs;
  down.first_column = inputs.first, down.n = kOutputs, down.k = inputs.count;
  gate.records = down.records = records;
  const std::vector<PackedFormat> formats = {format, format};
  const int count = records.empty() ? kRecords : static_cast<int>(records.size());
  return *LayOut({.name = "experts", .count = count, .parts = {gate, down}}, formats);
}

PackedMatrix MatrixOf(const RegionPlan& region, const std::vector<std::byte>& bytes, int record, int part) {
  PackedMatrix matrix;
  matrix.layout = region.layouts[part];
  matrix.data = bytes.data() + record * region.stride + region.offsets[part];
  return matrix;
}

std::vector<float> Row(const PackedMatrix& matrix, int row) {
  std::vector<float> values(matrix.k());
  UnpackRow(matrix, row, values);
  return values;
}

class PackedFormatTest : public testing::TestWithParam<int> {};

TEST_P(PackedFormatTest, SlicesHaveTheValuesOfTheWholeMatrix) {
  const auto format = static_cast<PackedFormat>(GetParam());
  const RegionPlan whole = PlanOf(format, {0, kOutputs}, {0, kInputs}, {});
  std::mt19937 random(GetParam());
  // All bytes below 0x40 are finite numbers in all formats.
  std::vector<std::byte> bytes(whole.bytes);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() & 0x3f);
  const std::vector<int32_t> records = {0, 2};
  for (const Range& inputs : {Range{0, 256}, Range{256, 512}, Range{512, 256}}) {
    for (const Range& outputs : {Range{0, 40}, Range{48, 32}}) {
      const RegionPlan slice = PlanOf(format, outputs, inputs, records);
      std::vector<std::byte> part(slice.bytes);
      for (const SlicePiece& piece : SlicePieces(whole, bytes.data(), slice, part.data())) piece.Copy();
      for (int record = 0; record < 2; ++record) {
        const PackedMatrix gate = MatrixOf(slice, part, record, 0), down = MatrixOf(slice, part, record, 1);
        const PackedMatrix all_gate = MatrixOf(whole, bytes, records[record], 0),
                           all_down = MatrixOf(whole, bytes, records[record], 1);
        for (int row = 0; row < outputs.count; ++row) {
          ASSERT_EQ(Row(gate, row), Row(all_gate, outputs.first + row)) << row;
        }
        for (int row = 0; row < kOutputs; ++row) {
          const std::vector<float> all = Row(all_down, row), columns = Row(down, row);
          ASSERT_TRUE(std::equal(columns.begin(), columns.end(), all.begin() + inputs.first)) << row;
          if (!down.has_sums()) continue;
          double sum = 0;  // of the int8 elements
          for (const float value : columns) sum += value / down.scales()[row];
          ASSERT_NEAR(down.sums()[row], sum, 0.01) << row;
        }
      }
    }
  }
}

// MLA has one record per head, with two matrices of one module.
TEST(PackedSlicesTest, SlicesOfHeadsHaveTheRecordsOfTheirHeads) {
  const auto plan_of = [](int first, int count) {
    constexpr int kHeadRows = 48;
    PartDecl keys = {.module = "kv_b_proj",
                     .module_out = 4 * kHeadRows,
                     .module_in = 64,
                     .first_row = first * kHeadRows,
                     .record_rows = kHeadRows,
                     .n = 32,
                     .k = 64};
    PartDecl values = keys;
    values.first_row += keys.n, values.n = 16;
    const std::vector<PackedFormat> formats(2, PackedFormat::kF32);
    return *LayOut({.name = "kv_b_proj", .count = count, .parts = {keys, values}}, formats);
  };
  const RegionPlan whole = plan_of(0, 4), slice = plan_of(2, 2);
  std::mt19937 random(1);
  std::vector<std::byte> bytes(whole.bytes), part(slice.bytes);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() & 0x3f);
  for (const SlicePiece& piece : SlicePieces(whole, bytes.data(), slice, part.data())) piece.Copy();
  for (int head = 0; head < 2; ++head) {
    for (int p = 0; p < 2; ++p) {
      const PackedMatrix own = MatrixOf(slice, part, head, p), all = MatrixOf(whole, bytes, 2 + head, p);
      for (int row = 0; row < own.n(); ++row) ASSERT_EQ(Row(own, row), Row(all, row));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, PackedFormatTest, testing::Range(0, tensor::kPackedFormats),
                         [](const auto& info) {
                           return tensor::PackedFormatName(static_cast<PackedFormat>(info.param));
                         });

}  // namespace
}  // namespace moesaic::models
