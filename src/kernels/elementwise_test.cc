// Compares RmsNorm, SiluMul, Add and Rope of every implementation that this processor can run with sums in
// double.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "kernels/elementwise.h"
#include "kernels/impl_list.h"
#include "kernels/test_context.h"

namespace moesaic::kernels {
namespace {

constexpr double kUnit = 0x1p-24;  // maximum relative error of one rounding to float

// Sizes around every lane count, unrolled step and tail, and those of real models.
const std::vector<int> kSizes = {1,  2,  7,  8,  9,   15,  16,   17,   31,  33,
                                 63, 64, 65, 96, 127, 576, 1536, 2048, 7168};

template <typename Fn>
std::vector<Impl<Fn>> OnHost(ImplList<Fn> impls) {
  const runtime::CpuFeatures host = runtime::DetectCpu();
  std::vector<Impl<Fn>> found;
  for (const Impl<Fn>& impl : impls) {
    if (host.Has(impl.needs)) found.push_back(impl);
  }
  return found;
}

// A row between guards that must not change.
class GuardedRow {
 public:
  explicit GuardedRow(std::vector<float> values) : size_(values.size()), memory_(values.size() + 64, kGuard) {
    std::copy(values.begin(), values.end(), memory_.begin() + 32);
  }
  ~GuardedRow() {
    for (size_t i = 0; i < 32; ++i) {
      EXPECT_EQ(memory_[i], kGuard);
      EXPECT_EQ(memory_[32 + size_ + i], kGuard);
    }
  }
  float* data() { return memory_.data() + 32; }
  float operator[](size_t i) const { return memory_[32 + i]; }

 private:
  static constexpr float kGuard = 12345.0F;
  size_t size_;
  std::vector<float> memory_;
};

TEST(ElementwiseTest, RmsNormMatchesDouble) {
  std::mt19937 rng(1);
  for (const auto& impl : OnHost(RmsNormImpls())) {
    for (int n : kSizes) {
      SCOPED_TRACE(testing::Message() << impl.name << " n " << n);
      const std::vector<float> x = RandomValues(&rng, n, 3), weight = RandomValues(&rng, n, 2);
      GuardedRow y(x);  // in place
      impl.fn(y.data(), weight.data(), n, 1e-6F, y.data());
      double squares = 0;
      for (float v : x) squares += double{v} * v;
      const double inverse = 1 / std::sqrt(squares / n + 1e-6);
      // The sum of squares has non-negative terms: each of at most n/32 + 7 sequential additions rounds once,
      // and the square root halves that. Mean, root, quotient and two products add six.
      const double bound = (n / 32.0 + 7) / 2 * kUnit + 6 * kUnit;
      for (int i = 0; i < n; ++i) {
        const double expected = x[i] * inverse * weight[i];
        ASSERT_NEAR(y[i], expected, std::abs(expected) * bound) << i;
      }
    }
  }
}

TEST(ElementwiseTest, RmsNormOfZerosIsZero) {
  for (const auto& impl : OnHost(RmsNormImpls())) {
    std::vector<float> x(100), weight(100, 2.0F), y(100, 7.0F);
    impl.fn(x.data(), weight.data(), 100, 1e-6F, y.data());
    EXPECT_EQ(y, x) << impl.name;
  }
}

TEST(ElementwiseTest, SiluMulMatchesDouble) {
  std::mt19937 rng(2);
  for (const auto& impl : OnHost(SiluMulImpls())) {
    for (int n : kSizes) {
      SCOPED_TRACE(testing::Message() << impl.name << " n " << n);
      const std::vector<float> gate = RandomValues(&rng, n, 20), up = RandomValues(&rng, n, 2);
      GuardedRow y(gate);  // over its own gate
      impl.fn(y.data(), up.data(), n, y.data());
      for (int i = 0; i < n; ++i) {
        const double expected = gate[i] / (1 + std::exp(-double{gate[i]})) * up[i];
        // exp has an error of two units (exp-inl.h; libm is nearer), the sum, quotient and two products one
        // each.
        ASSERT_NEAR(y[i], expected, std::abs(expected) * 6 * kUnit) << gate[i];
      }
    }
  }
}

// Every 1,001st float of either sign, up to where the logistic function leaves the normal floats.
TEST(ElementwiseTest, SiluMulMatchesDoubleOverWholeRange) {
  std::vector<float> gate;
  for (uint32_t bits = 0; bits < std::bit_cast<uint32_t>(87.0F); bits += 1001) {
    gate.push_back(std::bit_cast<float>(bits));
    gate.push_back(-std::bit_cast<float>(bits));
  }
  const std::vector<float> up(gate.size(), 1.0F);
  std::vector<float> y(gate.size());
  for (const auto& impl : OnHost(SiluMulImpls())) {
    impl.fn(gate.data(), up.data(), static_cast<int>(gate.size()), y.data());
    double worst = 0;
    for (size_t i = 0; i < gate.size(); ++i) {
      const double expected = gate[i] / (1 + std::exp(-double{gate[i]}));
      if (std::abs(expected) < 1e-30) continue;  // products of denormals
      worst = std::max(worst, std::abs(y[i] / expected - 1));
    }
    EXPECT_LT(worst, 6 * kUnit) << impl.name;
  }
}

TEST(ElementwiseTest, SiluMulHandlesExtremeInputs) {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> gate = {-1e4F, -100, -88, 0, 88, 100, 1e4F, inf, nan};
  const std::vector<float> up(gate.size(), 1.0F);
  for (const auto& impl : OnHost(SiluMulImpls())) {
    std::vector<float> y(gate.size());
    impl.fn(gate.data(), up.data(), static_cast<int>(gate.size()), y.data());
    // e^x stops at 2^-126, so for very negative x, x e^x is as small as x 2^-126 but not zero.
    for (int i = 0; i < 3; ++i) EXPECT_NEAR(y[i], 0, -gate[i] * 0x1p-125) << impl.name;
    for (int i = 3; i < 8; ++i) EXPECT_EQ(y[i], gate[i]) << impl.name;
    EXPECT_TRUE(std::isnan(y[8])) << impl.name;
  }
}

TEST(ElementwiseTest, AxpyMatchesDouble) {
  std::mt19937 rng(3);
  for (const auto& impl : OnHost(AxpyImpls())) {
    for (int n : kSizes) {
      const std::vector<float> x = RandomValues(&rng, n, 3), before = RandomValues(&rng, n, 3);
      GuardedRow y(before);
      impl.fn(0.3F, x.data(), n, y.data());
      for (int i = 0; i < n; ++i) {
        const double product = double{0.3F} * x[i];
        // One rounding of the product, one of the sum.
        ASSERT_NEAR(y[i], before[i] + product, (std::abs(product) * 2 + std::abs(before[i])) * kUnit)
            << impl.name;
      }
    }
  }
}

TEST(ElementwiseTest, AxpbyRoundsEachStep) {
  std::mt19937 rng(3);
  for (const auto& impl : OnHost(AxpbyImpls())) {
    for (int n : kSizes) {
      const std::vector<float> x = RandomValues(&rng, n, 3), before = RandomValues(&rng, n, 3);
      GuardedRow y(before);
      impl.fn(0.3F, x.data(), -0.7F, n, y.data());
      for (int i = 0; i < n; ++i) {
        const auto a = static_cast<float>(double{0.3F} * x[i]),
                   b = static_cast<float>(double{-0.7F} * before[i]);
        ASSERT_EQ(y[i], static_cast<float>(double{a} + b)) << impl.name;
      }
    }
  }
}

// Tests AMLA's identity over every exponent and both ends of every mantissa. The bits equal those of the
// product with a power of two wherever number and product are normal; other inputs never become a number.
TEST(ElementwiseTest, RescaleIsExact) {
  std::vector<float> x;
  for (uint32_t exponent = 0; exponent < 256; ++exponent) {
    for (uint32_t mantissa : {0U, 1U, 0x2aaaaaU, 0x400000U, 0x7fffffU}) {
      for (uint32_t sign : {0U, 0x80000000U})
        x.push_back(std::bit_cast<float>(sign | exponent << 23 | mantissa));
    }
  }
  for (const auto& impl : OnHost(RescaleImpls())) {
    for (int halvings : {0, 1, 2, 23, 24, 100, 126, 127, 253, 254, 255, 256, 100000}) {
      SCOPED_TRACE(testing::Message() << impl.name << " by 2^-" << halvings);
      GuardedRow y(x);
      impl.fn(y.data(), static_cast<int>(x.size()), halvings);
      for (size_t i = 0; i < x.size(); ++i) {
        const double product = std::ldexp(double{x[i]}, -halvings);
        float expected = x[i];  // infinities and NaN
        if (std::isfinite(x[i])) {
          const bool normal = std::isnormal(x[i]) && std::abs(product) >= std::numeric_limits<float>::min();
          expected = normal ? static_cast<float>(product) : 0.0F;
          ASSERT_TRUE(!normal || expected == product) << x[i];
        }
        ASSERT_EQ(std::bit_cast<uint32_t>(y[i]), std::bit_cast<uint32_t>(expected)) << x[i];
      }
    }
    for (int n : kSizes) {
      const std::vector<float> row(n, 6.0F);
      GuardedRow y(row);
      impl.fn(y.data(), n, 2);
      for (int i = 0; i < n; ++i) ASSERT_EQ(y[i], 1.5F);
    }
  }
}

TEST(ElementwiseTest, RopeMatchesDouble) {
  std::mt19937 rng(4);
  for (bool interleaved : {false, true}) {
    for (const auto& impl : OnHost(interleaved ? RopeInterleavedImpls() : RopeHalfImpls())) {
      for (int dim : {2, 4, 6, 8, 10, 14, 16, 18, 30, 32, 34, 64, 96, 128}) {
        SCOPED_TRACE(testing::Message() << impl.name << " dim " << dim);
        const std::vector<float> x = RandomValues(&rng, dim, 3);
        const std::vector<float> cos = RandomValues(&rng, dim / 2, 1), sin = RandomValues(&rng, dim / 2, 1);
        GuardedRow y(x);
        impl.fn(y.data(), cos.data(), sin.data(), dim);
        for (int i = 0; i < dim / 2; ++i) {
          const int a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + dim / 2;
          // Two products and a sum of at most 6: three roundings.
          const double bound = 3 * 6 * kUnit;
          ASSERT_NEAR(y[a], double{x[a]} * cos[i] - double{x[b]} * sin[i], bound) << i;
          ASSERT_NEAR(y[b], double{x[b]} * cos[i] + double{x[a]} * sin[i], bound) << i;
        }
      }
    }
  }
}

// The operators apply the micro-kernels to rows with strides on several threads.
class ElementwiseOpsTest : public testing::TestWithParam<int> {};

TEST_P(ElementwiseOpsTest, SupportsRowsAndStrides) {
  TestContext test(runtime::Isa::kRef, GetParam());
  const ExecContext ctx = test.context();
  std::mt19937 rng(5);
  for (int rows : {0, 1, 3, 50}) {
    const int n = 700, stride = 720;
    const std::vector<float> x = RandomValues(&rng, size_t(rows) * stride, 2),
                             weight = RandomValues(&rng, n, 1);
    std::vector<float> y(size_t(rows) * stride, 9), z = y, expected = y;
    RmsNorm(ctx, {x.data(), stride, weight.data(), y.data(), stride, rows, n, 1e-5F});
    for (int r = 0; r < rows; ++r) {
      ctx.kernels->rms_norm(&x[r * stride], weight.data(), n, 1e-5F, &expected[r * stride]);
    }
    EXPECT_EQ(y, expected);

    SiluMul(ctx, {x.data(), y.data(), z.data(), stride, stride, stride, rows, n});
    expected.assign(expected.size(), 9);
    for (int r = 0; r < rows; ++r) {
      ctx.kernels->silu_mul(&x[r * stride], &y[r * stride], n, &expected[r * stride]);
    }
    EXPECT_EQ(z, expected);

    expected = z;
    for (size_t i = 0; i < z.size(); ++i) expected[i] += x[i];
    Add(ctx, x.data(), static_cast<int64_t>(x.size()), z.data());
    EXPECT_EQ(z, expected);
  }
}

TEST_P(ElementwiseOpsTest, RopeRotatesEachHeadByRowPosition) {
  TestContext test(runtime::Isa::kRef, GetParam());
  std::mt19937 rng(6);
  const int rows = 200, heads = 3, dim = 16, head_stride = 24, stride = 80, positions = 50;
  const std::vector<float> cos = RandomValues(&rng, positions * dim / 2, 1),
                           sin = RandomValues(&rng, positions * dim / 2, 1);
  std::vector<float> x = RandomValues(&rng, rows * stride, 1), expected = x;
  std::vector<int32_t> position(rows);
  for (int& p : position) p = static_cast<int>(rng() % positions);
  const ExecContext ctx = test.context();
  for (bool interleaved : {false, true}) {
    Rope(ctx, {x.data(), stride, head_stride, rows, heads, dim, position.data(), cos.data(), sin.data(),
               interleaved});
    for (int r = 0; r < rows; ++r) {
      for (int h = 0; h < heads; ++h) {
        const auto rotate = interleaved ? ctx.kernels->rope_interleaved : ctx.kernels->rope_half;
        rotate(&expected[r * stride + h * head_stride], &cos[position[r] * dim / 2],
               &sin[position[r] * dim / 2], dim);
      }
    }
    EXPECT_EQ(x, expected);
  }
}

TEST(RopeDeathTest, RefusesToRotateBeyondAHead) {
#ifdef GTEST_FLAG_SET
  GTEST_FLAG_SET(death_test_style, "threadsafe");
#else  // before GoogleTest 1.12
  testing::FLAGS_gtest_death_test_style = "threadsafe";
#endif
  TestContext test(runtime::Isa::kRef, 1);
  std::vector<float> x(32);
  const std::vector<float> angles(16);
  const int32_t position = 0;
  const ExecContext ctx = test.context();
  EXPECT_DEATH(Rope(ctx, {x.data(), 32, /*head_stride=*/16, 1, 2, /*dim=*/18, &position, angles.data(),
                          angles.data(), false}),
               "p.dim <= p.head_stride");
}

INSTANTIATE_TEST_SUITE_P(Threads, ElementwiseOpsTest, testing::Values(1, 2, 5));

}  // namespace
}  // namespace moesaic::kernels
