#include "tensor/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace moesaic::tensor {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(DType, HasBlockSizesAndNames) {
  EXPECT_EQ(BytesOf(DType::kF32, 10), 40);
  EXPECT_EQ(BytesOf(DType::kBF16, 10), 20);
  EXPECT_EQ(BytesOf(DType::kQ8_0, 64), 68);
  EXPECT_EQ(BytesOf(DType::kQ4K, 512), 288);
  EXPECT_EQ(BytesOf(DType::kQ6K, 256), 210);
  EXPECT_EQ(DTypeName(DType::kF8E4M3), "F8_E4M3");
  EXPECT_EQ(DTypeName(DType::kQ6K), "Q6_K");
  EXPECT_EQ(BytesOf(DType::kMxfp4, 64), 34);
  EXPECT_EQ(DTypeName(DType::kMxfp4), "MXFP4");
}

TEST(DType, EveryHalfSurvivesTheRoundTrip) {
  for (int bits = 0; bits < 0x10000; ++bits) {
    const auto half = static_cast<uint16_t>(bits);
    const float value = HalfToFloat(half);
    if (std::isnan(value)) {
      EXPECT_EQ((half >> 10) & 0x1f, 31);
      EXPECT_TRUE(std::isnan(HalfToFloat(FloatToHalf(value))));
    } else {
      EXPECT_EQ(FloatToHalf(value), half);
      EXPECT_EQ(value,
                static_cast<float>(std::ldexp((half & 0x7c00) != 0 ? 1024 + (half & 0x3ff) : half & 0x3ff,
                                              std::max((half >> 10) & 0x1f, 1) - 25)) *
                        ((half & 0x8000) != 0 ? -1 : 1) +
                    (std::isinf(value) ? value : 0));
    }
  }
}

TEST(DType, HalfRoundsToNearestEven) {
  EXPECT_EQ(FloatToHalf(1 + 0x1p-11F), 0x3c00);             // half way: rounds to even, down
  EXPECT_EQ(FloatToHalf(1 + 3 * 0x1p-11F), 0x3c02);         // half way: rounds to even, up
  EXPECT_EQ(FloatToHalf(1 + 0x1p-11F + 0x1p-20F), 0x3c01);  // above half way
  EXPECT_EQ(FloatToHalf(65519.99F), 0x7bff);
  EXPECT_EQ(FloatToHalf(65520), 0x7c00);
  EXPECT_EQ(FloatToHalf(-kInf), 0xfc00);
  EXPECT_EQ(FloatToHalf(0x1p-25F), 0);  // half of the smallest denormal: rounds to even
  EXPECT_EQ(FloatToHalf(0x1.8p-25F), 1);
  EXPECT_EQ(FloatToHalf(-0.0F), 0x8000);
}

TEST(DType, BF16RoundsToNearestEvenAndKeepsNan) {
  EXPECT_EQ(ToBF16(1 + 0x1p-8F).bits, 0x3f80);
  EXPECT_EQ(ToBF16(1 + 3 * 0x1p-8F).bits, 0x3f82);
  EXPECT_EQ(ToBF16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(ToBF16(-kInf).bits, 0xff80);
  EXPECT_TRUE(std::isnan(ToFloat(ToBF16(std::numeric_limits<float>::quiet_NaN()))));
  EXPECT_TRUE(std::isnan(ToFloat(ToBF16(std::bit_cast<float>(0x7f800001U)))));  // low payload only
  for (int bits = 0; bits < 0x7f80; ++bits) {
    EXPECT_EQ(ToBF16(ToFloat(BF16{static_cast<uint16_t>(bits)})).bits, bits);
  }
}

TEST(DType, ConvertsFloat8) {
  EXPECT_EQ(F8E4M3ToFloat(0x7e), 448);
  EXPECT_EQ(F8E4M3ToFloat(0x08), 0x1p-6F);  // smallest normal
  EXPECT_EQ(F8E4M3ToFloat(0x01), 0x1p-9F);  // smallest denormal
  EXPECT_EQ(F8E4M3ToFloat(0xb8), -1);
  EXPECT_TRUE(std::isnan(F8E4M3ToFloat(0x7f)) && std::isnan(F8E4M3ToFloat(0xff)));
  EXPECT_EQ(F8E5M2ToFloat(0x3c), 1);
  EXPECT_EQ(F8E5M2ToFloat(0x7b), 57344);
  EXPECT_EQ(F8E5M2ToFloat(0x01), 0x1p-16F);
  EXPECT_EQ(F8E5M2ToFloat(0xfc), -kInf);
}

TEST(DType, RoundsToFloat8BetweenAllCodes) {
  for (int code = 0; code < 0x7e; ++code) {
    const float low = F8E4M3ToFloat(static_cast<uint8_t>(code)),
                high = F8E4M3ToFloat(static_cast<uint8_t>(code + 1)), middle = (low + high) / 2;
    EXPECT_EQ(FloatToF8E4M3(low), code);
    EXPECT_EQ(FloatToF8E4M3(-low), code | 0x80);
    EXPECT_EQ(FloatToF8E4M3(std::nextafter(middle, 0.0F)), code);
    EXPECT_EQ(FloatToF8E4M3(middle), code + code % 2);
    EXPECT_EQ(FloatToF8E4M3(-std::nextafter(middle, 500.0F)), (code + 1) | 0x80);
  }
  for (const float large : {448.0F, 449.0F, 1e30F, kInf}) {
    EXPECT_EQ(FloatToF8E4M3(large), 0x7e);
    EXPECT_EQ(FloatToF8E4M3(-large), 0xfe);
  }
  EXPECT_EQ(FloatToF8E4M3(std::numeric_limits<float>::quiet_NaN()), 0x7f);
}

}  // namespace
}  // namespace moesaic::tensor
