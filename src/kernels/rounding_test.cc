// Compares every instruction set's rounding with ref/ bit for bit over odd sizes, and ref/ with sorted lists
// of the numbers. quantizer/gptq/gptq_test.cc tests blocks of columns.
#include "kernels/rounding.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "kernels/ref/rounding.h"
#include "kernels/test_context.h"
#include "tensor/dtype.h"
#include "tensor/group_format.h"

namespace moesaic::kernels {
namespace {

struct Number {
  float value;
  uint8_t code;
};

// Returns the non-negative numbers of a grid in ascending order, and for integers also the negative ones.
std::vector<Number> NumbersOf(NumberGrid grid) {
  std::vector<Number> numbers;
  const auto add = [&](float value, int code) { numbers.push_back({value, static_cast<uint8_t>(code)}); };
  switch (grid) {
    case NumberGrid::kInt8:
      for (int i = -127; i <= 127; ++i) add(static_cast<float>(i), i);
      break;
    case NumberGrid::kInt4:
      for (int i = -8; i <= 7; ++i) add(static_cast<float>(i), i);
      break;
    case NumberGrid::kE2M1:
      for (int i = 0; i < 8; ++i) add(tensor::kE2M1[i], i);
      break;
    default:
      for (int i = 0; i <= 0x7e; ++i) add(tensor::F8E4M3ToFloat(static_cast<uint8_t>(i)), i);
  }
  return numbers;
}

uint8_t Encode(NumberGrid grid, float value) {
  uint8_t code = 0;
  ref::kRounding[static_cast<int>(grid)].encode(&value, 1, 1.0F, &code);
  return code;
}

TEST(Rounding, RoundsToNearestTiesToEvenCodes) {
  for (int g = 0; g < kNumberGrids; ++g) {
    const auto grid = static_cast<NumberGrid>(g);
    const std::vector<Number> numbers = NumbersOf(grid);
    const bool has_sign_bit = grid == NumberGrid::kE2M1 || grid == NumberGrid::kE4M3;
    const int sign = grid == NumberGrid::kE2M1 ? 8 : 0x80;
    for (size_t i = 0; i < numbers.size(); ++i) {
      EXPECT_EQ(Encode(grid, numbers[i].value), numbers[i].code);
      if (has_sign_bit) {
        EXPECT_EQ(Encode(grid, -numbers[i].value), numbers[i].code | sign);
      }
      if (i + 1 == numbers.size()) break;
      const Number low = numbers[i], high = numbers[i + 1];
      const float middle = low.value + (high.value - low.value) / 2;
      const uint8_t even = low.code % 2 == 0 ? low.code : high.code;
      EXPECT_EQ(Encode(grid, std::nextafter(middle, -1e9F)), low.code) << g << " " << middle;
      EXPECT_EQ(Encode(grid, middle), even) << g << " " << middle;
      EXPECT_EQ(Encode(grid, std::nextafter(middle, 1e9F)), high.code) << g << " " << middle;
    }
    for (const float beyond : {1e3F, 1e30F, INFINITY}) {
      EXPECT_EQ(Encode(grid, beyond), numbers.back().code);
      EXPECT_EQ(Encode(grid, -beyond), has_sign_bit ? numbers.back().code | sign : numbers.front().code);
    }
  }
}

class RoundingTest : public testing::TestWithParam<runtime::Isa> {
 protected:
  RoundingTest() : test_(GetParam(), 1) {}
  TestContext test_;
  std::mt19937 rng_{7};
};

TEST_P(RoundingTest, RunsEqualRef) {
  for (int g = 0; g < kNumberGrids; ++g) {
    const Rounding& got = test_.context().kernels->rounding[g];
    const Rounding& ref = ref::kRounding[g];
    for (const int count : {0, 1, 15, 16, 17, 32, 63, 100, 1000}) {
      const std::vector<float> values = RandomValues(&rng_, count, 9);
      std::vector<float> weight = RandomValues(&rng_, count, 1);
      for (float& w : weight) w = std::fabs(w);
      std::vector<uint8_t> a(count), b(count);
      for (const float scale : {1.0F, 0.013F, -0.7F}) {
        got.encode(values.data(), count, scale, a.data());
        ref.encode(values.data(), count, scale, b.data());
        EXPECT_EQ(a, b);
        EXPECT_EQ(got.error(values.data(), nullptr, count, scale),
                  ref.error(values.data(), nullptr, count, scale));
        EXPECT_EQ(got.error(values.data(), weight.data(), count, scale),
                  ref.error(values.data(), weight.data(), count, scale));
        std::vector<float> scales(kRoundScales), errors(kRoundScales), ref_errors(kRoundScales);
        for (int s = 0; s < kRoundScales; ++s) scales[s] = scale * (1 - 0.02F * static_cast<float>(s));
        got.scale_errors(values.data(), weight.data(), count, scales.data(), errors.data());
        ref.scale_errors(values.data(), weight.data(), count, scales.data(), ref_errors.data());
        EXPECT_EQ(errors, ref_errors);
        for (int s = 0; s < kRoundScales; ++s) {
          // Sums of `count` squares in another order differ by 2^-24 per addition. value / scale and value *
          // (1 / scale) differ by 2^-23 and rarely round to another number, which has almost the same error.
          const float error = got.error(values.data(), weight.data(), count, scales[s]);
          EXPECT_NEAR(errors[s], error, 2e-4F * error + 1e-6F);
        }
        float sums[2], expected[2];
        got.scale_sums(values.data(), weight.data(), count, scale, sums);
        ref.scale_sums(values.data(), weight.data(), count, scale, expected);
        EXPECT_EQ(sums[0], expected[0]);
        EXPECT_EQ(sums[1], expected[1]);
      }
      EXPECT_EQ(got.largest_bits(values.data(), count), ref.largest_bits(values.data(), count));
    }
  }
}

TEST_P(RoundingTest, BlocksEqualRef) {
  constexpr int kRows = kRoundBlockRows;
  for (int g = 0; g < kNumberGrids; ++g) {
    for (const int columns : {1, 2, 31, 128}) {
      const size_t size = size_t{kRows} * columns;
      const auto values = RandomValues(&rng_, size, 1), feedback = RandomValues(&rng_, size, 0.1F);
      auto factor = RandomValues(&rng_, size_t(columns) * columns, 0.2F),
           scales = RandomValues(&rng_, kRows, 1);
      for (int c = 0; c < columns; ++c) factor[c * columns + c] = 1.5F;
      for (float& scale : scales) scale = 0.1F + std::fabs(scale);
      const std::vector<const float*> scale_of(columns, scales.data());
      const auto run = [&](const Rounding& rounding) {
        std::vector<float> errors(size), losses(kRows, 0.5F);
        std::vector<uint8_t> codes(size);
        rounding.block({.columns = columns,
                        .values = values.data(),
                        .feedback = feedback.data(),
                        .scales = scale_of.data(),
                        .factor = factor.data(),
                        .factor_stride = columns,
                        .errors = errors.data(),
                        .codes = codes.data(),
                        .losses = losses.data()});
        return std::tuple(errors, losses, codes);
      };
      EXPECT_EQ(run(test_.context().kernels->rounding[g]), run(ref::kRounding[g]));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, RoundingTest, testing::ValuesIn(runtime::HostIsas(runtime::DetectCpu())),
                         IsaTestName);

}  // namespace
}  // namespace moesaic::kernels
