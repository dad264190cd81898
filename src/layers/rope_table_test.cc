#include "layers/rope_table.h"

#include <gtest/gtest.h>

#include <cmath>

namespace moesaic::layers {
namespace {

TEST(RopeTableTest, ComputesPlainAngles) {
  const auto pool = *runtime::ThreadPool::Create({.threads = 2, .pin = false});
  RopeTable table = *RopeTable::Create({.dim = 4, .theta = 100}, 5000);
  table.Reserve(*pool, 1);
  table.Reserve(*pool, 5000);
  for (const int p : {0, 1, 1023, 1024, 4999}) {
    // Frequencies are 1 and 1/10. The latter is rounded to f32, which shifts an angle of 500 by up to 2e-5.
    EXPECT_NEAR(table.cos()[p * 2], std::cos(p), 1e-6) << p;
    EXPECT_NEAR(table.sin()[p * 2 + 1], std::sin(p / 10.0), 4e-5) << p;
  }
}

TEST(RopeTableTest, LinearDividesPositions) {
  const std::vector<float> plain = RopeFrequencies({.dim = 8});
  const std::vector<float> scaled =
      RopeFrequencies({.dim = 8, .scaling = RopeSpec::Scaling::kLinear, .factor = 4});
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_FLOAT_EQ(scaled[i], plain[i] / 4);
}

// High-frequency dimensions are unchanged, low-frequency ones are interpolated, and those between are blended
// monotonically.
TEST(RopeTableTest, YarnBlendsFrequencies) {
  const RopeSpec spec{.dim = 64,
                      .scaling = RopeSpec::Scaling::kYarn,
                      .factor = 40,
                      .original_context = 4096,
                      .attention_factor = 1};
  const std::vector<float> plain = RopeFrequencies({.dim = 64});
  const std::vector<float> yarn = RopeFrequencies(spec);
  // DeepSeek-V3: correction range [10, 23] of 32 frequencies.
  for (int i = 0; i <= 10; ++i) EXPECT_FLOAT_EQ(yarn[i], plain[i]) << i;
  for (int i = 23; i < 32; ++i) EXPECT_FLOAT_EQ(yarn[i], plain[i] / 40) << i;
  for (int i = 11; i < 23; ++i) {
    const double ramp = (i - 10) / 13.0;
    EXPECT_NEAR(yarn[i] / plain[i], ramp / 40 + 1 - ramp, 1e-6) << i;
  }
}

TEST(RopeTableTest, Llama3BlendsFrequencies) {
  const RopeSpec spec{.dim = 128,
                      .theta = 500000,
                      .scaling = RopeSpec::Scaling::kLlama3,
                      .factor = 8,
                      .original_context = 8192,
                      .low_freq_factor = 1,
                      .high_freq_factor = 4};
  const std::vector<float> plain = RopeFrequencies({.dim = 128, .theta = 500000});
  const std::vector<float> scaled = RopeFrequencies(spec);
  for (size_t i = 0; i < plain.size(); ++i) {
    const double wavelength = 2 * M_PI / plain[i];
    if (wavelength < 2048) {
      EXPECT_FLOAT_EQ(scaled[i], plain[i]) << i;
    } else if (wavelength > 8192) {
      EXPECT_FLOAT_EQ(scaled[i], plain[i] / 8) << i;
    }
    EXPECT_LE(scaled[i], plain[i]) << i;
    EXPECT_GE(scaled[i] * 1.000001, plain[i] / 8) << i;
  }
}

}  // namespace
}  // namespace moesaic::layers
