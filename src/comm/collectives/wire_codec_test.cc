#include "comm/collectives/wire_codec.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace moesaic::comm {
namespace {

std::vector<float> RandomValues(int count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random) * std::exp2(static_cast<float>(random() % 20) - 10.0F);
  return values;
}

std::vector<float> Rounded(WireFormat wire, const std::vector<float>& values) {
  std::vector<std::byte> encoded(EncodedBytes(wire, static_cast<int64_t>(values.size())));
  Encode(wire, values, encoded.data());
  std::vector<float> decoded(values.size());
  Decode(wire, encoded.data(), decoded);
  return decoded;
}

TEST(WireCodecTest, ErrorsAreWithinTheStatedBounds) {
  for (const int count : {0, 1, 127, 128, 129, 1000}) {
    const std::vector<float> values = RandomValues(count, 3);
    const std::vector<float> halves = Rounded(WireFormat::kBf16, values);
    const std::vector<float> bytes = Rounded(WireFormat::kInt8, values);
    for (int i = 0; i < count; ++i) {
      EXPECT_LE(std::fabs(halves[i] - values[i]), std::fabs(values[i]) * 0x1p-8F);
      float largest = 0;
      for (int k = i / 128 * 128; k < std::min(count, i / 128 * 128 + 128); ++k) {
        largest = std::max(largest, std::fabs(values[k]));
      }
      EXPECT_LE(std::fabs(bytes[i] - values[i]), largest / 254 * (1 + 0x1p-15F) * (1 + 0x1p-20F));
    }
  }
}

TEST(WireCodecTest, EncodingADecodedMessageChangesNothing) {
  for (const WireFormat wire : {WireFormat::kBf16, WireFormat::kInt8}) {
    for (unsigned seed = 0; seed < 200; ++seed) {
      const std::vector<float> once = Rounded(wire, RandomValues(300, seed));
      EXPECT_EQ(Rounded(wire, once), once);
      std::vector<float> in_place = RandomValues(300, seed);
      RoundToWire(wire, in_place);
      EXPECT_EQ(in_place, once);
    }
  }
}

TEST(WireCodecTest, GroupsThatAreNotFiniteBecomeNaN) {
  std::vector<float> values(256, 1.0F);
  values[5] = std::numeric_limits<float>::infinity();
  const std::vector<float> decoded = Rounded(WireFormat::kInt8, values);
  EXPECT_TRUE(std::isnan(decoded[0]) && std::isnan(decoded[127]));
  EXPECT_NEAR(decoded[128], 1.0F, 1.0F / 254);
  values[5] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(Rounded(WireFormat::kInt8, values)[5]));
  EXPECT_EQ(Rounded(WireFormat::kInt8, {0x1p-120F, -0.0F})[0], 0.0F);
}

}  // namespace
}  // namespace moesaic::comm
