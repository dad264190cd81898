#include "comm/exchange/payload.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace moesaic::comm {
namespace {

std::vector<std::byte> Encode(std::span<const float> row, Payload to) {
  std::vector<std::byte> wire(WireRowBytes(to, static_cast<int64_t>(row.size())));
  EncodeRow(Payload::kF32, std::as_bytes(row).data(), static_cast<int64_t>(row.size()), to, wire.data());
  return wire;
}

float ScaleOf(std::span<const std::byte> wire, int64_t hidden, int block) {
  float scale;
  std::memcpy(&scale, wire.data() + hidden + 4 * block, sizeof(scale));
  return scale;
}

TEST(PayloadTest, BytesOfARowIncludeOneScalePer128Elements) {
  EXPECT_EQ(WireRowBytes(Payload::kF32, 7168), 28672);
  EXPECT_EQ(WireRowBytes(Payload::kBf16, 7168), 14336);
  EXPECT_EQ(WireRowBytes(Payload::kF8E4M3, 7168), 7168 + 4 * 56);
  EXPECT_EQ(WireRowBytes(Payload::kInt8, 129), 129 + 8);
}

// A block whose largest magnitude is 448 has scale 1: each element must be the nearest e4m3 number.
TEST(PayloadTest, Fp8RoundsEveryBf16ValueAsTheReferenceDoes) {
  for (uint32_t bits = 0; bits < 0x43e00000U;
       bits += 0x2000U) {  // f32 below 448, finer than all ties of e4m3
    for (const uint32_t sign : {0U, 0x80000000U}) {
      const std::vector<float> row = {448, std::bit_cast<float>(bits | sign)};
      const auto wire = Encode(row, Payload::kF8E4M3);
      ASSERT_EQ(ScaleOf(wire, 2, 0), 1);
      ASSERT_EQ(static_cast<uint8_t>(wire[1]), tensor::FloatToF8E4M3(row[1])) << row[1];
    }
  }
}

TEST(PayloadTest, QuantizedRowsDecodeWithinTheirStepSize) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 3);
  for (const int hidden : {1, 127, 128, 129, 1000}) {
    std::vector<float> row(hidden), decoded(hidden);
    for (float& value : row) value = normal(random);
    for (const Payload payload : {Payload::kInt8, Payload::kF8E4M3}) {
      const auto wire = Encode(row, payload);
      DecodeRow(payload, wire.data(), hidden, decoded.data());
      for (int i = 0; i < hidden; ++i) {
        const float scale = ScaleOf(wire, hidden, i / kScaleBlock);
        // int8: half a step. e4m3: 3 bits of mantissa, and steps of 2^-9 below 2^-6. Both with rounding of
        // the scale.
        const double step = payload == Payload::kInt8 ? 0.5 * scale
                                                      : std::max(std::abs(row[i]) / 16.0,
                                                                 std::ldexp(static_cast<double>(scale), -10));
        ASSERT_LE(std::abs(decoded[i] - row[i]), step * 1.0001) << PayloadName(payload) << " " << i;
      }
    }
  }
}

TEST(PayloadTest, Bf16RowsGiveTheSameCodesAsTheirF32Values) {
  std::mt19937 random(2);
  const int hidden = 300;
  std::vector<tensor::BF16> narrow(hidden);
  std::vector<float> wide(hidden);
  for (int i = 0; i < hidden; ++i) {
    narrow[i] = tensor::ToBF16(static_cast<float>(random()) / 1e9F - 2);
    wide[i] = tensor::ToFloat(narrow[i]);
  }
  for (const Payload payload : {Payload::kInt8, Payload::kF8E4M3}) {
    std::vector<std::byte> wire(WireRowBytes(payload, hidden));
    EncodeRow(Payload::kBf16, std::as_bytes(std::span(narrow)).data(), hidden, payload, wire.data());
    EXPECT_EQ(wire, Encode(wide, payload));
  }
}

TEST(PayloadTest, SpecialBlocksDecodeToZerosOrNaN) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const Payload payload : {Payload::kInt8, Payload::kF8E4M3}) {
    float decoded[2];
    const std::vector<float> zeros = {0, -0.0F}, denormal = {1e-44F, 0}, infinite = {1, inf},
                             not_a_number = {nan, 1};
    DecodeRow(payload, Encode(zeros, payload).data(), 2, decoded);
    EXPECT_TRUE(decoded[0] == 0 && decoded[1] == 0);
    DecodeRow(payload, Encode(denormal, payload).data(), 2, decoded);
    EXPECT_TRUE(std::abs(decoded[0]) <= 2e-44F && decoded[1] == 0);
    DecodeRow(payload, Encode(infinite, payload).data(), 2, decoded);
    EXPECT_TRUE(std::isnan(decoded[0]) && std::isnan(decoded[1]));
    DecodeRow(payload, Encode(not_a_number, payload).data(), 2, decoded);
    EXPECT_TRUE(std::isnan(decoded[0]) && std::isnan(decoded[1]));
  }
}

TEST(PayloadTest, AccumulationRoundsTheProductBeforeTheSum) {
  // 1 + 2^-12 squared has a bit that only a fused operation would keep.
  const float value = 1 + std::ldexp(1.0F, -12);
  float sum = -value * value;
  AccumulateRow(Payload::kF32, reinterpret_cast<const std::byte*>(&value), 1, value, false, &sum);
  EXPECT_EQ(sum, 0);
  const tensor::BF16 narrow = tensor::ToBF16(3);
  AccumulateRow(Payload::kBf16, reinterpret_cast<const std::byte*>(&narrow), 1, 0.5F, true, &sum);
  EXPECT_EQ(sum, 1.5F);
}

TEST(PayloadTest, RowsNeverGainPrecisionOnTheWire) {
  EXPECT_TRUE(CanEncode(Payload::kF32, Payload::kF8E4M3));
  EXPECT_TRUE(CanEncode(Payload::kBf16, Payload::kInt8));
  EXPECT_FALSE(CanEncode(Payload::kBf16, Payload::kF32));
  EXPECT_FALSE(CanEncode(Payload::kInt8, Payload::kF8E4M3));
}

}  // namespace
}  // namespace moesaic::comm
