#include "tensor/group_format.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "runtime/memory.h"
#include "tensor/dtype.h"
#include "tensor/print_formats.h"

namespace moesaic::tensor {
namespace {

struct Packed {
  Packed(PackedFormat format, const GroupRows& rows) {
    matrix.layout = PackedLayout::Of(format, rows.rows, rows.k);
    buffer = *runtime::Buffer::Allocate(matrix.layout.total_bytes, false);
    PackGroupRows(matrix.layout, 0, rows, buffer.data());
    matrix.data = buffer.data();
  }
  std::vector<float> Row(int row) const {
    std::vector<float> values(matrix.k());
    UnpackRow(matrix, row, values);
    return values;
  }

  PackedMatrix matrix;
  runtime::Buffer buffer;
};

class GroupFormatTest : public testing::TestWithParam<PackedFormat> {
 protected:
  const GroupFormat& format() const { return GroupFormatOf(GetParam()); }
  int Groups(int k) const { return (k + format().group - 1) / format().group; }
};

// Checks the layout of group_format.h code by code and scale by scale.
TEST_P(GroupFormatTest, HasDocumentedLayout) {
  const int n = 19, k = 150;
  std::mt19937 rng(1);
  GroupRows rows;
  rows.Resize(GetParam(), n, k);
  for (uint8_t& code : rows.codes) code = static_cast<uint8_t>(rng() % (1U << format().code_bits));
  for (uint16_t& scale : rows.scales) scale = static_cast<uint16_t>(rng() % 0x7e);
  for (int r = 0; r < n; ++r) rows.output_scales[r] = static_cast<float>(r + 1);
  const Packed packed(GetParam(), rows);
  const PackedLayout& layout = packed.matrix.layout;
  const int64_t unit_bytes = 64 + 128 * format().code_bits;
  ASSERT_EQ(layout.panel_bytes, 3 * unit_bytes);
  ASSERT_EQ(layout.total_bytes, 2 * 3 * unit_bytes + 128);
  for (int r = 0; r < n; ++r) {
    for (int i = 0; i < k; ++i) {
      const auto* unit = reinterpret_cast<const uint8_t*>(packed.matrix.panel(r / 16)) + i / 64 * unit_bytes;
      const int in = i % 64, o = r % 16;
      const int code = format().code_bits == 8 ? unit[64 + in / 4 * 64 + 4 * o + in % 4]
                       : in % 8 < 4            ? unit[64 + in / 8 * 64 + 4 * o + in % 4] & 15
                                               : unit[64 + in / 8 * 64 + 4 * o + in % 4] >> 4;
      ASSERT_EQ(code, rows.codes[r * k + i]) << r << " " << i;
      uint16_t scale = 0;
      if (format().group == 16) {
        scale = unit[16 * (in / 16) + o];
      } else {
        std::memcpy(&scale, unit + 32 * (in / 32) + 2 * o, 2);
      }
      ASSERT_EQ(scale, rows.scales[r * Groups(k) + i / format().group]);
    }
    EXPECT_EQ(packed.matrix.scales()[r], rows.output_scales[r]);
  }
}

// Tolerance: half a step of the codes plus the rounding of the scale. f16 rounds to 2^-11, e4m3 to 2^-4, a
// power of two down to a half (values beyond 6 of its steps are clipped).
TEST_P(GroupFormatTest, QuantizesToTheNearestCode) {
  std::mt19937 rng(2);
  std::normal_distribution<float> normal;
  for (const auto& [n, k] : {std::pair{1, 1}, {15, 63}, {16, 64}, {17, 100}, {3, 32}}) {
    std::vector<float> values(size_t(n) * k);
    for (float& v : values) v = normal(rng) * 1e-3F;
    const Packed packed(GetParam(), QuantizeGroups(GetParam(), n, k, values.data()));
    for (int r = 0; r < n; ++r) {
      const std::vector<float> row = packed.Row(r);
      for (int g = 0; g < Groups(k); ++g) {
        const int first = g * format().group, end = std::min(first + format().group, k);
        float amax = 0;
        for (int i = first; i < end; ++i) amax = std::max(amax, std::fabs(values[r * k + i]));
        const float step = GetParam() == PackedFormat::kI8G32   ? amax / 127 * 0.501F
                           : GetParam() == PackedFormat::kI4G32 ? amax / 8 * 1.001F  // the other end is at 7
                           : GetParam() == PackedFormat::kNvfp4 ? amax / 6 * 1.07F
                                                                : amax / 4;
        for (int i = first; i < end; ++i) EXPECT_NEAR(row[i], values[r * k + i], step) << r << " " << i;
      }
    }
  }
}

TEST_P(GroupFormatTest, QuantizesZeroTinyAndLargestRows) {
  const int k = 64;
  std::vector<float> values(4 * k, 0.0F);
  values[k] = 1e-45F;
  values[2 * k] = 6e4F;
  values[2 * k + 1] = -6e4F;
  values[3 * k] = 1e-12F;  // below the range of f16 alone
  const Packed packed(GetParam(), QuantizeGroups(GetParam(), 4, k, values.data()));
  for (const float v : packed.Row(0)) EXPECT_EQ(v, 0);
  EXPECT_LE(std::fabs(packed.Row(1)[0]), 1e-44F);
  EXPECT_NEAR(packed.Row(2)[0], 6e4F, 6e4F / 4);
  EXPECT_NEAR(packed.Row(2)[1], -6e4F, 6e4F / 4);
  EXPECT_NEAR(packed.Row(3)[0], 1e-12F, 1e-12F / 4);
}

// Units have 64 inputs, with 64 bytes before every fourth.
TEST(GroupFormats, KFormatsHaveDocumentedLayout) {
  const int n = 18, k = 512;
  std::mt19937 rng(4);
  for (const PackedFormat format : {PackedFormat::kQ4K, PackedFormat::kQ6K}) {
    const bool q4 = format == PackedFormat::kQ4K;
    const int group = q4 ? 32 : 16, unit_bytes = q4 ? 576 : 832;
    GroupRows rows;
    rows.Resize(format, n, k);
    for (uint8_t& code : rows.codes) code = static_cast<uint8_t>(rng() % (q4 ? 16 : 64));
    for (uint16_t& scale : rows.scales) scale = static_cast<uint8_t>(rng());
    for (uint8_t& minimum : rows.minima) minimum = static_cast<uint8_t>(rng() % 64);
    for (uint16_t& super : rows.supers) super = static_cast<uint16_t>(rng() % 0x7c00);
    const Packed packed(format, rows);
    ASSERT_EQ(packed.matrix.layout.panel_bytes, 8 * unit_bytes + 2 * 64);
    for (int r = 0; r < n; ++r) {
      for (int i = 0; i < k; ++i) {
        const int u = i / 64, in = i % 64, o = r % 16;
        const auto* panel = reinterpret_cast<const uint8_t*>(packed.matrix.panel(r / 16));
        const uint8_t* unit = panel + u * unit_bytes + 64 * (u / 4 + 1);
        const uint8_t* super = panel + u / 4 * (4 * unit_bytes + 64);
        int code = unit[64 + in / 8 * 64 + 4 * o + in % 4] >> (in % 8 < 4 ? 0 : 4) & 15;
        if (!q4) code |= (unit[64 + 512 + in / 16 * 64 + 4 * o + in % 4] >> (in % 16 / 4 * 2) & 3) << 4;
        ASSERT_EQ(code, rows.codes[r * k + i]) << r << " " << i;
        const int at = r * (k / group) + i / group;
        ASSERT_EQ(unit[16 * (in / group) + o], rows.scales[at]);
        if (q4) {
          ASSERT_EQ(unit[32 + 16 * (in / group) + o], rows.minima[at]);
        }
        for (int which : {0, 1}) {
          uint16_t half = 0;
          std::memcpy(&half, super + 32 * which + 2 * o, 2);
          ASSERT_EQ(half, rows.supers[(r * 2 + i / 256) * 2 + which]);
        }
      }
    }
  }
}

// Codes from a checkpoint are kept unchanged: the test combines every code with every scale.
TEST(GroupFormats, KeepsAllNvfp4CodesUnderAllScales) {
  const PackedFormat format = PackedFormat::kNvfp4;
  GroupRows rows;
  rows.Resize(format, 256, 16);
  for (int scale = 0; scale < 256; ++scale) {
    for (int code = 0; code < 16; ++code) rows.codes[scale * 16 + code] = static_cast<uint8_t>(code);
    rows.scales[scale] = static_cast<uint16_t>((scale & 0x7f) == 0x7f ? 0 : scale);
    rows.output_scales[scale] = 0.37F;
  }
  const Packed packed(format, rows);
  for (int scale = 0; scale < 256; ++scale) {
    const std::vector<float> row = packed.Row(scale);
    for (int code = 0; code < 16; ++code) {
      const float expected = kE2M1[code] * F8E4M3ToFloat(static_cast<uint8_t>(rows.scales[scale])) * 0.37F;
      EXPECT_EQ(row[code], expected) << scale << " " << code;
    }
  }
}

TEST(GroupFormats, E2M1MatchesSpecification) {
  // OCP Microscaling Formats 1.0, table 2: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
  for (int code = 0; code < 8; ++code) {
    const int exponent = code >> 1, mantissa = code & 1;
    const float value = exponent == 0 ? 0.5F * static_cast<float>(mantissa)
                                      : std::ldexp(1.0F + 0.5F * static_cast<float>(mantissa), exponent - 1);
    EXPECT_EQ(kE2M1[code], value);
    EXPECT_EQ(kE2M1[code + 8], -value);
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, GroupFormatTest,
                         testing::Values(PackedFormat::kI8G32, PackedFormat::kI4G32, PackedFormat::kMxfp4,
                                         PackedFormat::kNvfp4),
                         [](const auto& info) { return PackedFormatName(info.param); });

}  // namespace
}  // namespace moesaic::tensor
