#include "tensor/packed.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "runtime/memory.h"
#include "tensor/dtype.h"
#include "tensor/print_formats.h"

namespace moesaic::tensor {
namespace {

std::vector<float> RandomValues(size_t count) {
  std::mt19937 rng(7);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& v : values) v = normal(rng);
  return values;
}

struct PackedRows {
  runtime::Buffer buffer;
  PackedMatrix matrix;
};

PackedRows Pack(PackedFormat format, int n, int k, const std::vector<float>& values) {
  PackedRows packed;
  packed.matrix.layout = PackedLayout::Of(format, n, k);
  packed.buffer = *runtime::Buffer::Allocate(packed.matrix.layout.total_bytes, false);
  packed.matrix.data = packed.buffer.data();
  // Two calls, like a converter that works in chunks of rows.
  const int first = n / 2 / kPanelRows * kPanelRows;
  PackRows(packed.matrix.layout, 0, first, values.data(), packed.buffer.data());
  PackRows(packed.matrix.layout, first, n - first, values.data() + size_t(first) * k, packed.buffer.data());
  return packed;
}

TEST(PackedLayout, PadsAndAligns) {
  const PackedLayout f32 = PackedLayout::Of(PackedFormat::kF32, 17, 65);
  EXPECT_EQ(f32.n_padded, 32);
  EXPECT_EQ(f32.k_padded, 128);
  EXPECT_EQ(f32.total_bytes, 32 * 128 * 4);
  EXPECT_EQ(f32.scales_offset, 0);
  const PackedLayout i8 = PackedLayout::Of(PackedFormat::kI8, 17, 65);
  EXPECT_EQ(i8.panel_bytes, 16 * 128);
  EXPECT_EQ(i8.scales_offset, 32 * 128);
  EXPECT_EQ(i8.sums_offset, 32 * 128 + 128);
  EXPECT_EQ(i8.total_bytes, 32 * 128 + 256);
}

// Checks the layout of packed.h element by element: [n/16][k/g][16][g].
TEST(PackedMatrix, HasDocumentedLayout) {
  const int n = 18, k = 70;
  std::vector<float> values(n * k);
  for (int i = 0; i < n * k; ++i) values[i] = static_cast<float>(i % 101);
  const PackedRows f32 = Pack(PackedFormat::kF32, n, k, values);
  const PackedRows bf16 = Pack(PackedFormat::kBF16, n, k, values);
  for (int row = 0; row < n; ++row) {
    for (int i = 0; i < k; ++i) {
      const float expected = values[row * k + i];
      const auto* panel32 = reinterpret_cast<const float*>(f32.matrix.panel(row / 16));
      EXPECT_EQ(panel32[i * 16 + row % 16], expected);
      const auto* panel16 = reinterpret_cast<const BF16*>(bf16.matrix.panel(row / 16));
      EXPECT_EQ(ToFloat(panel16[i / 2 * 32 + row % 16 * 2 + i % 2]), expected);
    }
  }
}

TEST(PackedMatrix, PackedI8ValuesKeepTheirBytesScalesAndSums) {
  const int n = 20, k = 67;
  std::vector<int8_t> values(n * k);
  std::vector<float> scales(n);
  for (int i = 0; i < n * k; ++i) values[i] = static_cast<int8_t>(i * 37 % 256 - 128);
  for (int i = 0; i < n; ++i) scales[i] = static_cast<float>(i + 1) / 8;
  PackedMatrix matrix{.layout = PackedLayout::Of(PackedFormat::kI8, n, k)};
  auto buffer = *runtime::Buffer::Allocate(matrix.layout.total_bytes, false);
  matrix.data = buffer.data();
  PackRowsI8(matrix.layout, 0, 16, values.data(), scales.data(), buffer.data());
  PackRowsI8(matrix.layout, 16, 4, values.data() + 16 * k, scales.data() + 16, buffer.data());
  std::vector<float> row(k);
  for (int r = 0; r < n; ++r) {
    int32_t sum = 0;
    UnpackRow(matrix, r, row);
    for (int i = 0; i < k; ++i) {
      const auto* panel = reinterpret_cast<const int8_t*>(matrix.panel(r / 16));
      EXPECT_EQ(panel[i / 4 * 64 + r % 16 * 4 + i % 4], values[r * k + i]);
      EXPECT_EQ(row[i], static_cast<float>(values[r * k + i]) * scales[r]);
      sum += values[r * k + i];
    }
    EXPECT_EQ(matrix.sums()[r], sum);
    EXPECT_EQ(matrix.scales()[r], scales[r]);
  }
  for (int r = n; r < 32; ++r) EXPECT_EQ(matrix.sums()[r], 0);
}

class PackedFormatTest : public testing::TestWithParam<PackedFormat> {};
class PlainFormatTest : public PackedFormatTest {};

// Tolerances: f32 is exact. bf16 keeps 8 bits, a relative error of at most half of 2^-7. int8 has an error of
// half a step of amax/127 plus its rounding. (Group-scaled formats: group_format_test.cc.)
TEST_P(PlainFormatTest, UnpacksPackedValues) {
  for (const auto& [n, k] : {std::pair{1, 1}, {15, 63}, {16, 64}, {17, 65}, {50, 100}}) {
    const auto values = RandomValues(size_t(n) * k);
    const PackedRows packed = Pack(GetParam(), n, k, values);
    std::vector<float> row(k);
    for (int r = 0; r < n; ++r) {
      UnpackRow(packed.matrix, r, row);
      float amax = 0;
      for (int i = 0; i < k; ++i) amax = std::max(amax, std::fabs(values[r * k + i]));
      for (int i = 0; i < k; ++i) {
        const float value = values[r * k + i];
        const float bound = GetParam() == PackedFormat::kF32    ? 0
                            : GetParam() == PackedFormat::kBF16 ? std::fabs(value) * 0x1p-8F
                                                                : amax / 127 * 0.5001F;
        EXPECT_NEAR(row[i], value, bound);
      }
    }
  }
}

TEST_P(PackedFormatTest, ViewsOfViewsReadTheMatrixRows) {
  const int n = 70, k = 80;
  const PackedRows packed = Pack(GetParam(), n, k, RandomValues(n * k));
  const PackedMatrix inner = packed.matrix.Rows(16, 54).Rows(32, 20);
  EXPECT_EQ(inner.n(), 20);
  EXPECT_EQ(inner.layout.panels(), 2);
  EXPECT_EQ(inner.panel(0), packed.matrix.panel(3));
  std::vector<float> a(k), b(k);
  for (int r = 0; r < 20; ++r) {
    UnpackRow(inner, r, a);
    UnpackRow(packed.matrix, 48 + r, b);
    EXPECT_EQ(a, b);
  }
  if (GetParam() == PackedFormat::kI8) {
    EXPECT_EQ(inner.sums()[3], packed.matrix.sums()[51]);
  }
}

// Rows read through images equal the rows of the matrix: copies are read on the given node, slices wherever
// they are.
TEST_P(PackedFormatTest, ReadsRowsThroughImages) {
  const int n = 70, k = 80, share = 3;
  const std::vector<float> values = RandomValues(n * k);
  const PackedRows whole = Pack(GetParam(), n, k, values);
  const PackedLayout slice = PackedLayout::Of(GetParam(), share * kPanelRows, k);
  const int64_t stride = slice.total_bytes + 64;
  const runtime::Buffer buffer = *runtime::Buffer::Allocate(2 * stride, false);
  PackRows(slice, 0, slice.n, values.data(), buffer.data());
  PackRows(slice, 0, n - slice.n, values.data() + size_t(slice.n) * k, buffer.data() + stride);
  PackedMatrix sliced{.layout = slice, .data = buffer.data(), .images = 2, .slice_panels = share};
  sliced.image_stride = stride;
  sliced.layout.n = n;
  sliced.layout.n_padded = whole.matrix.layout.n_padded;
  std::vector<float> a(k), b(k);
  for (int r = 0; r < n; ++r) {
    UnpackRow(whole.matrix, r, a);
    UnpackRow(sliced, r, b);
    EXPECT_EQ(a, b) << r;
    if (r < 32) continue;
    UnpackRow(sliced.Rows(32, n - 32), r - 32, b);
    EXPECT_EQ(a, b) << r;
  }
  EXPECT_EQ(sliced.At(1, 1).n(), 2 * kPanelRows);
  EXPECT_EQ(sliced.At(4, 0).n(), n - 4 * kPanelRows);
  EXPECT_EQ(sliced.At(4, 0).panel(0), buffer.data() + stride + slice.panel_bytes);
  PackedMatrix mirrored = whole.matrix;
  mirrored.images = 2;
  mirrored.image_stride = 4096;
  EXPECT_EQ(mirrored.At(2, 0).panel(0), whole.matrix.panel(2));
  EXPECT_EQ(mirrored.At(2, 1).panel(0), whole.matrix.panel(2) + 4096);
  EXPECT_EQ(mirrored.At(2, 3).panel(0), mirrored.At(2, 1).panel(0));
  EXPECT_EQ(mirrored.At(2, 1).n(), n - 2 * kPanelRows);
}

TEST_P(PackedFormatTest, NameParsesBack) {
  EXPECT_EQ(*ParsePackedFormat(PackedFormatName(GetParam())), GetParam());
  EXPECT_FALSE(ParsePackedFormat("int3").ok());
}

INSTANTIATE_TEST_SUITE_P(Formats, PlainFormatTest,
                         testing::Values(PackedFormat::kF32, PackedFormat::kBF16, PackedFormat::kI8),
                         [](const auto& info) { return PackedFormatName(info.param); });
INSTANTIATE_TEST_SUITE_P(Formats, PackedFormatTest,
                         testing::Values(PackedFormat::kF32, PackedFormat::kBF16, PackedFormat::kI8,
                                         PackedFormat::kF8G128, PackedFormat::kI8G32, PackedFormat::kI4G32,
                                         PackedFormat::kMxfp4, PackedFormat::kNvfp4),
                         [](const auto& info) { return PackedFormatName(info.param); });

TEST(PackedMatrix, QuantizesZeroTinyAndLargestRows) {
  const int k = 64;
  std::vector<float> values(3 * k, 0.0F);
  values[k] = 1e-45F;  // the smallest denormal: its scale underflows
  values[2 * k] = 3e38F;
  values[2 * k + 1] = -3e38F;
  const PackedRows packed = Pack(PackedFormat::kI8, 3, k, values);
  std::vector<float> row(k);
  for (int r : {0, 1}) {
    UnpackRow(packed.matrix, r, row);
    for (float v : row) EXPECT_EQ(v, 0);
  }
  UnpackRow(packed.matrix, 2, row);
  EXPECT_NEAR(row[0], 3e38F, 1e32F);
  EXPECT_EQ(packed.matrix.sums()[2], 0);
}

}  // namespace
}  // namespace moesaic::tensor
