#include "tensor/fp8_format.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "runtime/memory.h"
#include "tensor/dtype.h"

namespace moesaic::tensor {
namespace {

TEST(Fp8Format, HasDocumentedLayout) {
  const int n = 35, k = 300;
  std::mt19937 rng(1);
  Fp8Rows rows;
  rows.Resize(n, k);
  for (uint8_t& code : rows.codes) code = static_cast<uint8_t>(rng());
  for (float& scale : rows.scales) scale = static_cast<float>(rng() % 100) + 1;
  const PackedLayout layout = PackedLayout::Of(PackedFormat::kF8G128, n, k);
  EXPECT_EQ(layout.k_padded, 384);
  EXPECT_EQ(layout.panel_bytes, 3 * 2112);
  EXPECT_EQ(layout.total_bytes, 3 * 3 * 2112);
  const runtime::Buffer buffer = *runtime::Buffer::Allocate(layout.total_bytes, false);
  PackFp8Rows(layout, 0, rows, buffer.data());
  for (int r = 0; r < n; ++r) {
    for (int i = 0; i < k; ++i) {
      const auto* unit = buffer.as<uint8_t>() + r / 16 * 3 * 2112 + i / 128 * 2112;
      const int in = i % 128, o = r % 16;
      float scale = 0;
      std::memcpy(&scale, unit + 4 * o, 4);
      ASSERT_EQ(scale, rows.scales[r * 3 + i / 128]);
      ASSERT_EQ(unit[64 + 64 * (in / 4) + 16 * (o / 4) + 8 * (in % 4 / 2) + 2 * (o % 4) + in % 2],
                rows.codes[r * k + i]);
    }
  }
}

// Tolerance: half a step of e4m3, which is 2^-4 of a value, or 2^-10 of the scale where the code is a
// denormal.
TEST(Fp8Format, QuantizesToTheNearestCode) {
  std::mt19937 rng(2);
  std::normal_distribution<float> normal;
  for (const auto& [n, k] : {std::pair{1, 1}, {15, 127}, {16, 128}, {17, 300}}) {
    std::vector<float> values(size_t(n) * k), out(k);
    for (float& v : values) v = normal(rng) * 1e-3F;
    const PackedLayout layout = PackedLayout::Of(PackedFormat::kF8G128, n, k);
    const runtime::Buffer buffer = *runtime::Buffer::Allocate(layout.total_bytes, false);
    PackRows(layout, 0, n, values.data(), buffer.data());
    const PackedMatrix matrix{.layout = layout, .data = buffer.data()};
    for (int r = 0; r < n; ++r) {
      UnpackRow(matrix, r, out);
      for (int i = 0; i < k; ++i) {
        float amax = 0;
        for (int j = i / 128 * 128; j < std::min(i / 128 * 128 + 128, k); ++j)
          amax = std::max(amax, std::fabs(values[r * k + j]));
        const float step = std::max(std::fabs(values[r * k + i]) / 16, amax / 448 / 1024);
        EXPECT_NEAR(out[i], values[r * k + i], step * 1.001F) << r << " " << i;
      }
    }
  }
}

TEST(Fp8Format, QuantizesZeroTinyAndLargestRows) {
  const int k = 128;
  std::vector<float> values(3 * k, 0.0F), out(k);
  values[k] = 1e-45F;
  values[2 * k] = 3e38F;
  values[2 * k + 1] = -3e38F;
  const PackedLayout layout = PackedLayout::Of(PackedFormat::kF8G128, 3, k);
  const runtime::Buffer buffer = *runtime::Buffer::Allocate(layout.total_bytes, false);
  PackRows(layout, 0, 3, values.data(), buffer.data());
  const PackedMatrix matrix{.layout = layout, .data = buffer.data()};
  UnpackRow(matrix, 0, out);
  for (const float v : out) EXPECT_EQ(v, 0);
  UnpackRow(matrix, 1, out);
  EXPECT_LE(std::fabs(out[0]), 1e-44F);
  UnpackRow(matrix, 2, out);
  EXPECT_NEAR(out[0], 3e38F, 1e33F);
  EXPECT_NEAR(out[1], -3e38F, 1e33F);
}

TEST(Fp8Format, RoundsToEvenAndSaturates) {
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7f) == 0x7f) continue;
    EXPECT_EQ(FloatToF8E4M3(F8E4M3ToFloat(static_cast<uint8_t>(code))), code);
  }
  for (int code = 0; code < 0x7e; ++code) {
    const float low = F8E4M3ToFloat(static_cast<uint8_t>(code));
    const float high = F8E4M3ToFloat(static_cast<uint8_t>(code + 1)), middle = (low + high) / 2;
    EXPECT_EQ(FloatToF8E4M3(middle), code + code % 2);
    EXPECT_EQ(FloatToF8E4M3(std::nextafter(middle, 0.0F)), code);
    EXPECT_EQ(FloatToF8E4M3(std::nextafter(middle, 1e9F)), code + 1);
    EXPECT_EQ(FloatToF8E4M3(-middle), (code + code % 2) | 0x80);
  }
  EXPECT_EQ(FloatToF8E4M3(1e9F), 0x7e);
  EXPECT_EQ(FloatToF8E4M3(-1e9F), 0xfe);
}

}  // namespace
}  // namespace moesaic::tensor
