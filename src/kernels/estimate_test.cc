// Compares the estimates for block selection of every implementation that this processor can run with sums in
// double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/impl_list.h"
#include "kernels/test_context.h"
#include "kernels/test_keys.h"

namespace moesaic::kernels {
namespace {

struct EstimateShape {
  int key_dim, key_split;
};
// One part and two, with whole steps of 64 and partial ones, up to the maximum dimension.
constexpr EstimateShape kEstimateShapes[] = {{8, 8},     {24, 24},  {40, 32},   {64, 64},     {104, 8},
                                             {128, 128}, {136, 72}, {576, 512}, {1024, 1024}, {1024, 8}};
constexpr int kBlocks = 37, kStride = 40;

// Valid summaries with arbitrary centers and radii: no keys are needed.
std::vector<std::vector<std::byte>> RandomSummaries(std::mt19937* rng, const EstimateShape& shape) {
  std::vector<std::vector<std::byte>> summaries(kBlocks, std::vector<std::byte>(BoxBytes(shape.key_dim)));
  for (auto& summary : summaries) {
    for (std::byte& byte : summary) byte = static_cast<std::byte>((*rng)() & 0xffU);
    auto* centers = reinterpret_cast<int8_t*>(summary.data() + sizeof(KeySummaryHeader));
    for (int d = 0; d < shape.key_dim; ++d) centers[d] = std::max<int8_t>(centers[d], -127);
    const std::vector<float> sizes = RandomValues(rng, 6, 1);
    *reinterpret_cast<KeySummaryHeader*>(summary.data()) = {
        .center_scale = {std::abs(sizes[0]) / 100, std::abs(sizes[1]) / 100},
        .radius_scale = {std::abs(sizes[2]) / 255, std::abs(sizes[3]) / 255},
        .ball = {std::abs(sizes[4]) * 4, std::abs(sizes[5]) * 4},
        .sketch = {}};
  }
  return summaries;
}

size_t EstimateAt(int row, int block) {
  return (size_t(row / kScoreGroup) * kStride + block) * kScoreGroup + row % kScoreGroup;
}
std::vector<float> RunEstimates(KeySummaryEstimatesFn fn, const EstimateShape& shape,
                                const std::vector<float>& q, int rows,
                                const std::vector<std::vector<std::byte>>& summaries, float share) {
  std::vector<const std::byte*> table;
  for (const auto& summary : summaries) table.push_back(summary.data());
  std::vector<float> scores(EstimateAt(rows / kScoreGroup * kScoreGroup + kScoreGroup, 0) + 1, -5);
  fn({.q = q.data(),
      .q_stride = shape.key_dim + 8,
      .scale = 0.3F,
      .summaries = table.data(),
      .rows = rows,
      .count = static_cast<int>(summaries.size()),
      .key_dim = shape.key_dim,
      .key_split = shape.key_split,
      .share = share,
      .scores = scores.data(),
      .stride = kStride,
      .prefetch_bytes = BoxBytes(shape.key_dim),
      .next = table.data(),
      .next_count = static_cast<int>(summaries.size()),
      .next_prefetch_bytes = BoxBytes(shape.key_dim)});
  return scores;
}

class EstimateTest : public testing::TestWithParam<runtime::Isa> {
 protected:
  KernelTable kernels_ = SelectKernels(*runtime::LimitTo(runtime::DetectCpu(), GetParam()));

  static size_t At(int row, int block) { return EstimateAt(row, block); }
  static std::vector<float> Run(KeySummaryEstimatesFn fn, const EstimateShape& shape,
                                const std::vector<float>& q, int rows,
                                const std::vector<std::vector<std::byte>>& summaries, float share) {
    return RunEstimates(fn, shape, q, rows, summaries, share);
  }
};

// Queries are rounded to half a step of 1/(127 * 128) of their part's largest element, their magnitudes to
// half a step of 1/254; float sums to key_dim + 8 units of 2^-24 of the sum of magnitudes. A ball that limits
// the spread is smaller than the sum over the radii, and so is its error.
TEST_P(EstimateTest, MatchesDouble) {
  std::mt19937 rng(1);
  for (const EstimateShape& shape : kEstimateShapes) {
    for (const int rows : {1, 3, 8, 16, 21, 40, 128}) {
      if (rows == 128 && shape.key_dim != 40) continue;
      std::vector<float> q = RandomValues(&rng, size_t(rows) * (shape.key_dim + 8), 1);
      q[shape.key_dim / 2] *= 30;  // as queries are rounded
      const auto summaries = RandomSummaries(&rng, shape);
      for (const float share : {0.0F, 0.2F}) {
        const std::vector<float> ours = Run(kernels_.key_summary_estimates, shape, q, rows, summaries, share);
        for (int r = 0; r < rows; ++r) {
          EXPECT_EQ(ours[At(r, kBlocks)], -5);
          double largest[2] = {}, squares[2] = {};
          const auto at = [&](int d) { return double{0.3F} * q[size_t(r) * (shape.key_dim + 8) + d]; };
          for (int d = 0; d < shape.key_dim; ++d) {
            const int part = d < shape.key_split ? 0 : 1;
            largest[part] = std::max(largest[part], std::abs(at(d)));
            squares[part] += at(d) * at(d);
          }
          for (int b = 0; b < kBlocks; ++b) {
            const auto& header = *reinterpret_cast<const KeySummaryHeader*>(summaries[b].data());
            const auto* centers = reinterpret_cast<const int8_t*>(&header + 1);
            const auto* radii = reinterpret_cast<const uint8_t*>(centers + shape.key_dim);
            double allowed = 1e-6, expected = 0, reach[2] = {};
            for (int d = 0; d < shape.key_dim; ++d) {
              const int part = d < shape.key_split ? 0 : 1;
              const double center = double{header.center_scale[part]} * centers[d];
              const double radius = double{share} * radii[d] * header.radius_scale[part];
              expected += center * at(d);
              reach[part] += radius * std::abs(at(d));
              allowed += (std::abs(center) / (2 * 127 * 128) + radius / (2 * 254)) * largest[part] +
                         (shape.key_dim + 8) * 0x1p-24 * (std::abs(center) + radius) * std::abs(at(d));
            }
            for (int part = 0; part < 2; ++part) {
              expected += std::min(reach[part], share * std::sqrt(squares[part]) * header.ball[part]);
            }
            ASSERT_NEAR(ours[At(r, b)], expected, allowed)
                << shape.key_dim << ", " << shape.key_split << ", rows " << rows << ", share " << share;
          }
        }
      }
    }
  }
}

TEST_P(EstimateTest, RowsAndBlocksAreIndependent) {
  std::mt19937 rng(2);
  for (const EstimateShape& shape : kEstimateShapes) {
    const int row_floats = shape.key_dim + 8;
    const std::vector<float> q = RandomValues(&rng, size_t(37) * row_floats, 1);
    const auto summaries = RandomSummaries(&rng, shape);
    const std::vector<float> all = Run(kernels_.key_summary_estimates, shape, q, 37, summaries, 0.2F);
    for (const int r : {0, 7, 15, 16, 36}) {
      const std::vector<float> one(q.begin() + int64_t{r} * row_floats,
                                   q.begin() + int64_t{r + 1} * row_floats);
      for (const int b : {0, 3, 15, 33, 36}) {
        EXPECT_EQ(Run(kernels_.key_summary_estimates, shape, one, 1, {summaries[b]}, 0.2F)[0], all[At(r, b)]);
      }
    }
  }
}

// Runs on processors with both: docs/contracts/sparsity.md, C2.
TEST(EstimateBitsTest, TilesAndRegistersGiveSameBits) {
  const runtime::CpuFeatures cpu = runtime::DetectCpu();
  if (!cpu.Has(runtime::Isa::kAmx)) GTEST_SKIP() << "this processor has no AMX";
  const auto fn_of = [&](runtime::Isa isa) {
    return SelectKernels(*runtime::LimitTo(cpu, isa)).key_summary_estimates;
  };
  const KeySummaryEstimatesFn tiles = fn_of(runtime::Isa::kAmx), registers = fn_of(runtime::Isa::kAvx512Vnni);
  ASSERT_NE(tiles, registers);
  std::mt19937 rng(6);
  for (const EstimateShape& shape : kEstimateShapes) {
    for (const int rows : {1, 8, 9, 16, 40}) {
      const std::vector<float> q = RandomValues(&rng, size_t(rows) * (shape.key_dim + 8), 1);
      const auto summaries = RandomSummaries(&rng, shape);
      for (const float share : {0.0F, 0.2F}) {
        const std::vector<float> ours = RunEstimates(tiles, shape, q, rows, summaries, share);
        const std::vector<float> others = RunEstimates(registers, shape, q, rows, summaries, share);
        for (int r = 0; r < rows; ++r) {
          for (int b = 0; b < kBlocks; ++b)
            ASSERT_EQ(ours[EstimateAt(r, b)], others[EstimateAt(r, b)]) << shape.key_dim;
        }
      }
    }
  }
}

// NaN affects only the row or the summary that has it; zero rows cause no division by zero.
TEST_P(EstimateTest, NonFiniteInputsAffectOnlyTheirRowOrBlock) {
  std::mt19937 rng(3);
  for (const EstimateShape& shape : {EstimateShape{128, 128}, EstimateShape{40, 32}}) {
    for (const int rows : {4, 12}) {
      std::vector<float> q = RandomValues(&rng, size_t(rows) * (shape.key_dim + 8), 1);
      auto summaries = RandomSummaries(&rng, shape);
      reinterpret_cast<KeySummaryHeader*>(summaries[5].data())->center_scale[0] =
          std::numeric_limits<float>::quiet_NaN();
      q[shape.key_dim + 8 + 3] = std::numeric_limits<float>::quiet_NaN();
      std::fill_n(q.begin() + 2 * int64_t{shape.key_dim + 8}, shape.key_dim, 0.0F);
      const std::vector<float> scores = Run(kernels_.key_summary_estimates, shape, q, rows, summaries, 0.2F);
      for (int b = 0; b < kBlocks; ++b) {
        EXPECT_EQ(std::isnan(scores[At(0, b)]), b == 5);
        EXPECT_TRUE(std::isnan(scores[At(1, b)]));
        if (b != 5) {
          EXPECT_EQ(scores[At(2, b)], 0);
        }
        EXPECT_EQ(std::isnan(scores[At(rows - 1, b)]), b == 5);
      }
    }
  }
}

// Exp has a relative error of 2^-23, its argument 2^-24 of up to 200; sums are of positive numbers.
TEST_P(EstimateTest, SharesMatchDouble) {
  std::mt19937 rng(4);
  for (const int rows : {1, 5, 8, 9, 16}) {
    for (const int blocks : {1, 3, 4, 37, 256}) {
      std::vector<float> scores = RandomValues(&rng, size_t(blocks) * kScoreGroup, 30);
      const float nan = std::numeric_limits<float>::quiet_NaN();
      for (int b = 0; b < blocks; ++b) {
        for (int r = rows; r < kScoreGroup; ++r) scores[b * kScoreGroup + r] = r % 2 == 0 ? nan : 1e30F;
      }
      const bool infinite = rows == 5;  // a score that is not finite must be reported in either way
      if (blocks > 4) {
        std::fill_n(scores.begin() + 3 * kScoreGroup, rows,
                    infinite ? -std::numeric_limits<float>::infinity() : nan);
      }
      std::vector<double> expected(blocks, 0);
      for (int r = 0; r < rows; ++r) {
        double most = -1e30, sum = 0;
        const auto at = [&](int b) { return double{scores[size_t(b) * kScoreGroup + r]}; };
        for (int b = 0; b < blocks; ++b) most = at(b) > most ? at(b) : most;
        for (int b = 0; b < blocks; ++b) sum += std::isnan(at(b)) ? 0 : std::exp(at(b) - most);
        for (int b = 0; b < blocks; ++b) expected[b] += std::exp(at(b) - most) / sum;
      }
      std::vector<float> shares(blocks + 1, 7);
      kernels_.block_shares(scores.data(), rows, blocks, shares.data());
      for (int b = 0; b < blocks; ++b) {
        if (blocks > 4 && b == 3) {
          EXPECT_TRUE(std::isnan(shares[b]));
        } else {
          EXPECT_NEAR(shares[b], expected[b], expected[b] * 4e-5 + 1e-30)
              << rows << " " << blocks << " " << b;
        }
      }
      EXPECT_EQ(shares[blocks], 7);
    }
  }
}

TEST_P(EstimateTest, RowsOfNaNHaveNoShares) {
  std::mt19937 rng(5);
  for (const int rows : {2, 5, 8, 9, 16}) {
    for (const int blocks : {1, 3, 37}) {
      const std::vector<float> scores = RandomValues(&rng, size_t(blocks) * kScoreGroup, 30);
      const auto shares_without = [&](int row) {
        std::vector<float> broken = scores, shares(blocks);
        for (int b = 0; b < blocks; ++b) {
          broken[size_t(b) * kScoreGroup + row] = std::numeric_limits<float>::quiet_NaN();
        }
        kernels_.block_shares(broken.data(), rows, blocks, shares.data());
        return shares;
      };
      std::vector<float> fewer = scores, shares(blocks);
      kernels_.block_shares(fewer.data(), rows - 1, blocks, shares.data());
      EXPECT_EQ(shares_without(rows - 1), shares) << "as if it were idle: " << rows << " " << blocks;
      double sum = 0;
      for (const float share : shares_without(1)) sum += share;
      // For each row: the sum over blocks, the quotient and the products have an error of at most (blocks +
      // 4) units of 2^-24, plus one for each row added.
      EXPECT_NEAR(sum, rows - 1, (rows - 1) * (blocks + 4 + rows) * 0x1p-23) << rows << " " << blocks;
    }
  }
}

TEST_P(EstimateTest, SharesAreNotDenormal) {
  constexpr int kRows = 3;
  for (const float below : {70.0F, 72.0F, 72.5F, 80.0F, 87.0F, 95.0F, 102.0F, 500.0F}) {
    std::vector<float> scores(size_t{kBlocks} * kScoreGroup, 5 - below), shares(kBlocks);
    std::fill_n(scores.begin() + 7 * kScoreGroup, kRows, 5.0F);
    kernels_.block_shares(scores.data(), kRows, kBlocks, shares.data());
    for (int b = 0; b < kBlocks; ++b) {
      if (b == 7) {
        EXPECT_EQ(shares[b], kRows) << below;
      } else if (below > 72) {
        EXPECT_EQ(shares[b], 0) << below;
      } else {
        EXPECT_GT(shares[b], 0x1p-104F) << below;
      }
    }
  }
}

std::vector<runtime::Isa> EstimateIsas() {
  std::vector<runtime::Isa> found;
  for (const auto& impl : KeySummaryEstimatesImpls()) {
    if (runtime::DetectCpu().Has(impl.needs)) found.push_back(impl.needs);
  }
  return found;
}
INSTANTIATE_TEST_SUITE_P(Host, EstimateTest, testing::ValuesIn(EstimateIsas()), IsaTestName);

}  // namespace
}  // namespace moesaic::kernels
