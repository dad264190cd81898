#include "quantizer/gptq/gptq.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "quantizer/gptq/test_gptq.h"
#include "runtime/print_isa.h"

namespace moesaic::quantizer {
namespace {

class GptqTest : public testing::TestWithParam<runtime::Isa> {};

TEST_P(GptqTest, CodesAreNearestToTheCorrectedWeights) {
  const TestContext threads(2, GetParam());
  struct Case {
    int n, k, tokens;
  };
  for (const Case& c : {Case{70, 128, 400}, Case{5, 256, 300}, Case{66, 384, 200}}) {
    const std::vector<float> weights = TestWeights(c.n, c.k, 1);
    const Hessian hessian = HessianOf(threads, TestTokens(c.tokens, c.k, 1, 2), c.k);
    const auto factor = FactorHessian(threads.ctx, hessian, {});
    ASSERT_TRUE(factor.ok()) << factor.status();
    const Eigen::MatrixXd h = Damped(hessian, factor->damping);
    for (const Grid& grid : kGrids) {
      GptqReport report;
      const auto matrix =
          RoundByGptq(threads.ctx, grid, weights.data(), c.n, c.k, *factor, {true, {}, 0}, &report);
      ASSERT_TRUE(matrix.ok()) << matrix.status();
      ExpectCodesOfGptq(weights, *matrix, *factor, h);
      const double loss = LossOf(Errors(weights, *matrix), h);
      // Errors and factor have random relative errors of 2^-9 each; those of large sums are smaller.
      EXPECT_NEAR(report.loss, loss, 0x1p-8 * loss);
      EXPECT_NEAR(OutputLoss(threads.ctx, *factor, Errors(weights, *matrix).data(), c.n), loss,
                  0x1p-8 * loss);
    }
  }
}

// Sums gathered in the factor's order, from calls split elsewhere, equal those of the Hessian.
TEST_P(GptqTest, FactorOfInputsEqualsThatOfTheirHessian) {
  const TestContext one(1, GetParam()), three(3, GetParam());
  struct Case {
    int k, tokens;
    float damping;
  };
  // The last case has fewer tokens than inputs, so its damping must be raised.
  for (const Case& c : {Case{1100, 1030, 0.01F}, Case{203, 700, 0.01F}, Case{600, 200, 1e-9F}}) {
    const std::vector<float> x = TestTokens(c.tokens, c.k, 1, 17);
    auto hessian = *Hessian::Create(c.k);
    hessian.Add(one.ctx, AllTokens(x, c.k));
    const FactorOptions options{.damping = c.damping};
    const auto expected = FactorHessian(one.ctx, hessian, options);
    ASSERT_TRUE(expected.ok()) << expected.status();
    Factorizer factorizer;
    int visits = 0;
    const auto got = factorizer.Factor(
        three.ctx, c.k,
        [&](const auto& sink) {
          ++visits;
          for (int first = 0; first < c.tokens; first += kProductTokens) {
            const int count = std::min(kProductTokens, c.tokens - first);
            sink({.f32 = x.data() + int64_t{first} * c.k, .stride = c.k, .count = count});
          }
          return OkStatus();
        },
        options);
    ASSERT_TRUE(got.ok()) << got.status();
    ASSERT_NE(got->factor, nullptr);
    EXPECT_EQ(visits, 1 + got->factor->attempts);
    // Incomplete inputs are not factored.
    for (const int last : {1, 2}) {
      Factorizer stopped;
      int calls = 0;
      const auto cut = stopped.Factor(
          three.ctx, c.k,
          [&](const auto& sink) {
            sink({.f32 = x.data(), .stride = c.k, .count = 1});
            return ++calls == last ? Cancelled("stopped") : OkStatus();
          },
          options);
      EXPECT_EQ(cut.status().code(), StatusCode::kCancelled);
      EXPECT_EQ(calls, last);
    }
    EXPECT_EQ(got->factor->attempts > 1, c.damping < 0.01F);
    EXPECT_EQ(got->tokens, hessian.tokens());
    EXPECT_EQ(got->factor->order, expected->order);
    EXPECT_EQ(got->factor->diagonal, expected->diagonal);
    EXPECT_EQ(got->factor->damping, expected->damping);
    const std::vector<float> weights = TestWeights(40, c.k, 18);
    const Grid grid{GridKind::kInt8Channel, 0};
    GptqReport a, b;
    const auto mine = RoundByGptq(one.ctx, grid, weights.data(), 40, c.k, *expected, {}, &a);
    const auto theirs = RoundByGptq(three.ctx, grid, weights.data(), 40, c.k, *got->factor, {}, &b);
    EXPECT_EQ(mine->codes, theirs->codes);
    EXPECT_EQ(a.loss, b.loss);
    EXPECT_EQ(OutputLoss(one.ctx, *expected, weights.data(), 40),
              OutputLoss(one.ctx, *got->factor, weights.data(), 40));
  }
}

INSTANTIATE_TEST_SUITE_P(, GptqTest, testing::ValuesIn(runtime::HostIsas(runtime::DetectCpu())),
                         [](const auto& isa) { return runtime::IsaName(isa.param); });

TEST(Gptq, RoundsPartialBlocksOfInt8AndFp8) {
  const TestContext threads(2);
  const int n = 131, k = 203;
  const std::vector<float> weights = TestWeights(n, k, 3);
  const Hessian hessian = HessianOf(threads, TestTokens(500, k, 1, 4), k);
  const auto factor = FactorHessian(threads.ctx, hessian, {});
  for (const Grid& grid :
       {Grid{GridKind::kInt8Channel, 0}, Grid{GridKind::kFp8Block, 128}, Grid{GridKind::kInt8Group, 0}}) {
    GptqReport report;
    const auto matrix = RoundByGptq(threads.ctx, grid, weights.data(), n, k, *factor, {}, &report);
    ASSERT_TRUE(matrix.ok()) << matrix.status();
    ExpectCodesOfGptq(weights, *matrix, *factor, Damped(hessian, factor->damping));
  }
}

TEST(Gptq, LosesLessThanRoundingToNearest) {
  const TestContext threads(2);
  const int n = 100, k = 512;
  const std::vector<float> weights = TestWeights(n, k, 5);
  const Hessian hessian = HessianOf(threads, TestTokens(3000, k, 1, 6), k);
  const auto factor = FactorHessian(threads.ctx, hessian, {});
  const Eigen::MatrixXd h = Damped(hessian, factor->damping);
  for (const Grid& grid : kGrids) {
    for (const bool by_error : {false, true}) {
      GptqReport report;
      const auto nearest = RoundToNearest(threads.ctx, grid, weights.data(), n, k, {by_error, {}, 0});
      const auto matrix =
          RoundByGptq(threads.ctx, grid, weights.data(), n, k, *factor, {by_error, {}, 0}, &report);
      const double before = LossOf(Errors(weights, *nearest), h), after = LossOf(Errors(weights, *matrix), h);
      EXPECT_LT(after, 0.6 * before) << static_cast<int>(grid.kind);
      // Sampled from 64 of 100 rows.
      EXPECT_NEAR(report.of_nearest, after / before, 0.1 * after / before);
      EXPECT_EQ(matrix->scales, nearest->scales);
    }
  }
}

TEST(Gptq, EqualsRoundingToNearestForIndependentInputs) {
  const TestContext threads(2);
  const int n = 67, k = 256;
  const std::vector<float> weights = TestWeights(n, k, 7);
  std::vector<float> x(k * k, 0.0F);
  for (int i = 0; i < k; ++i) x[i * k + i] = 1 + static_cast<float>(i % 7);
  const auto factor = FactorHessian(threads.ctx, HessianOf(threads, x, k), {});
  for (const Grid& grid : kGrids) {
    GptqReport report;
    const auto nearest = RoundToNearest(threads.ctx, grid, weights.data(), n, k, {});
    const auto matrix = RoundByGptq(threads.ctx, grid, weights.data(), n, k, *factor, {}, &report);
    EXPECT_EQ(matrix->codes, nearest->codes);
    EXPECT_NEAR(report.of_nearest, 1, 1e-6);
  }
}

TEST(Gptq, BitsDoNotDependOnThreads) {
  const TestContext one(1), three(3);
  const int n = 150, k = 384;
  const std::vector<float> weights = TestWeights(n, k, 8), x = TestTokens(900, k, 1, 9);
  const auto run = [&](const TestContext& threads, const Grid& grid) {
    const auto factor = FactorHessian(threads.ctx, HessianOf(threads, x, k), {});
    GptqReport report;
    const auto matrix =
        RoundByGptq(threads.ctx, grid, weights.data(), n, k, *factor, {true, factor->diagonal, 0}, &report);
    return std::tuple(matrix->codes, matrix->scales, report.loss, report.of_nearest);
  };
  for (const Grid& grid : kGrids) EXPECT_EQ(run(one, grid), run(three, grid));
}

// Memory used by a larger factor and a larger Hessian before changes nothing.
TEST(Gptq, FactorsCorrectlyInReusedMemory) {
  const TestContext threads(2);
  const int n = 40, k = 704;
  const Hessian large = HessianOf(threads, TestTokens(2000, 1100, 1, 16), 1100);
  const std::vector<float> weights = TestWeights(n, k, 17), x = TestTokens(900, k, 1, 18);
  Hessian reused = HessianOf(threads, TestTokens(2000, 1100, 1, 16), 1100);
  ASSERT_TRUE(reused.Restart(threads.ctx, k).ok());
  reused.Add(threads.ctx, AllTokens(x, k));
  Factorizer factorizer;
  ASSERT_TRUE(factorizer.Factor(threads.ctx, large, {}).ok());
  const auto again = factorizer.Factor(threads.ctx, reused, {});
  ASSERT_TRUE(again.ok()) << again.status();
  const auto fresh = FactorHessian(threads.ctx, HessianOf(threads, x, k), {});
  for (const Grid& grid : {kGrids[1], kGrids[3]}) {
    GptqReport report, expected;
    const auto matrix = RoundByGptq(threads.ctx, grid, weights.data(), n, k, **again, {}, &report);
    const auto other = RoundByGptq(threads.ctx, grid, weights.data(), n, k, *fresh, {}, &expected);
    EXPECT_EQ(matrix->codes, other->codes);
    EXPECT_EQ(report.loss, expected.loss);
    EXPECT_EQ(report.of_nearest, expected.of_nearest);
  }
}

TEST(Gptq, AllocatesAtMostItsDeclaredMemory) {
  const TestContext threads(2);
  const int n = 1000, k = 512;
  const Grid grid{GridKind::kInt4Group, 32};
  const std::vector<float> weights = TestWeights(n, k, 14);
  const auto factor = FactorHessian(threads.ctx, HessianOf(threads, TestTokens(700, k, 1, 15), k), {});
  TestContext fresh(2);  // with unused scratch memory
  GptqReport report;
  ASSERT_TRUE(RoundByGptq(fresh.ctx, grid, weights.data(), n, k, *factor, {}, &report).ok());
  const int64_t said = GptqBytes(grid, n, k, 2);
  EXPECT_LE(static_cast<int64_t>(fresh.scratch.peak_bytes()), said);
  EXPECT_LT(said, 4 * n * k * int64_t{sizeof(float)});
}

TEST(Gptq, DeadInputsKeepTheirNearestCodes) {
  const TestContext threads(2);
  const int n = 20, k = 128;
  const std::vector<float> weights = TestWeights(n, k, 10);
  std::vector<float> x = TestTokens(300, k, 1, 11);
  for (size_t at = 0; at < x.size(); ++at) {
    if (at % k == 5 || at % k == 77) x[at] = 0;
  }
  const auto factor = FactorHessian(threads.ctx, HessianOf(threads, x, k), {});
  EXPECT_EQ(factor->dead, 2);
  GptqReport report;
  const Grid grid{GridKind::kInt4Group, 32};
  const auto nearest = RoundToNearest(threads.ctx, grid, weights.data(), n, k, {});
  const auto matrix = RoundByGptq(threads.ctx, grid, weights.data(), n, k, *factor, {}, &report);
  for (int r = 0; r < n; ++r) {
    for (const int c : {5, 77}) EXPECT_EQ(matrix->codes[r * k + c], nearest->codes[r * k + c]);
  }
}

TEST(Gptq, DampingRisesUntilTheHessianIsPositiveDefinite) {
  const TestContext threads(2);
  const int k = 256;
  // Two tokens are far from spanning 256 inputs, and 1e-9 of the diagonal vanishes in f32.
  const Hessian hessian = HessianOf(threads, TestTokens(2, k, 1, 12), k);
  const auto factor = FactorHessian(threads.ctx, hessian, {.damping = 1e-9F});
  ASSERT_TRUE(factor.ok()) << factor.status();
  EXPECT_GT(factor->attempts, 1);
  EXPECT_GT(factor->damping, 1e-9F);
  const auto enough = FactorHessian(threads.ctx, hessian, {});
  EXPECT_EQ(enough->attempts, 1);
}

TEST(Gptq, FactorizationStopsWhenItsWatchFails) {
  const TestContext threads(2);
  const int k = 1000;  // 8 blocks of columns
  const Hessian hessian = HessianOf(threads, TestTokens(1200, k, 1, 21), k);
  int asked = 0;
  const auto whole = FactorHessian(threads.ctx, hessian, {.watch = [&] {
                                     ++asked;
                                     return OkStatus();
                                   }});
  ASSERT_TRUE(whole.ok()) << whole.status();
  EXPECT_EQ(asked, 8) << "before each block of columns";
  Factorizer factorizer;
  for (int stop = 1; stop <= asked; ++stop) {
    int calls = 0;
    const auto stopped = factorizer.Factor(threads.ctx, hessian, {.watch = [&]() -> Status {
                                             return ++calls < stop ? OkStatus() : Cancelled("stopped");
                                           }});
    EXPECT_EQ(stopped.status().code(), StatusCode::kCancelled);
    EXPECT_EQ(calls, stop) << "immediately";
  }
  const auto again = factorizer.Factor(threads.ctx, hessian, {});
  ASSERT_TRUE(again.ok()) << "in memory of interrupted factorizations";
  EXPECT_EQ((*again)->diagonal, whole->diagonal);
  EXPECT_EQ(std::memcmp((*again)->diagonal_block(0), whole->diagonal_block(0),
                        sizeof(float) * kFactorBlock * (*again)->k_padded),
            0);
}

TEST(Gptq, RejectsAHessianWithoutInformation) {
  const TestContext threads(1);
  const auto none = Hessian::Create(64);
  EXPECT_THAT(Message(FactorHessian(threads.ctx, *none, {}).status()),
              testing::HasSubstr("no calibration token"));
  EXPECT_THAT(
      Message(FactorHessian(threads.ctx, HessianOf(threads, std::vector<float>(64 * 3), 64), {}).status()),
      testing::HasSubstr("0 in every"));
  std::vector<float> x = TestTokens(10, 64, 1, 13);
  x[3 * 64 + 7] = NAN;
  EXPECT_THAT(Message(FactorHessian(threads.ctx, HessianOf(threads, x, 64), {}).status()),
              testing::HasSubstr("input"));
}

}  // namespace
}  // namespace moesaic::quantizer
