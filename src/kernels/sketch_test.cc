// Tests the estimates of sketches, and every implementation of their scores that this processor can run.
#include "kernels/sketch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "kernels/impl_list.h"
#include "kernels/ref/key_summary.h"
#include "kernels/test_context.h"
#include "kernels/test_keys.h"

namespace moesaic::kernels {
namespace {

using tensor::DType;

struct SketchShape {
  int key_dim, key_split;
};
// One plane and two, one part and two, widths with partial steps, powers of two and others.
constexpr SketchShape kSketchShapes[] = {{8, 8},     {24, 24}, {40, 32},   {64, 64},  {96, 96},
                                         {104, 104}, {104, 8}, {128, 128}, {136, 64}, {576, 512}};

// Keys around a common center, with their summary.
struct Block : TestKeys {
  Block(std::mt19937* rng, const SketchShape& shape, DType dtype, float far = 3)
      : TestKeys(dtype, shape.key_dim, shape.key_split) {
    const std::vector<float> center = RandomValues(rng, key_dim, far);
    keys = RandomValues(rng, size_t(kBlockKeys) * key_dim, 1);
    scales = RandomValues(rng, size_t(2) * kBlockKeys, 0.1F);
    for (float& scale : scales) scale = std::abs(scale) + 0.02F;
    for (int j = 0; j < kBlockKeys; ++j) {
      for (int d = 0; d < key_dim; ++d) {
        float& x = keys[size_t(j) * key_dim + d];
        x += center[d];
        Put(j, d, dtype == DType::kI8 ? std::clamp(std::round(x / scale(j, d)), -127.0F, 127.0F) : x);
        x = static_cast<float>(At(j, d));
      }
    }
    Make();
  }
  void Make() {
    summary.assign(SketchLayoutOf(key_dim, key_split).bytes + 16, std::byte{0x5a});
    ref::KeySummary(Task(summary.data()));
    MakeSketches(Task(summary.data()));
  }

  std::vector<std::byte> summary;
  std::vector<float> keys;  // as stored
};

// Queries in the kernels' format.
struct Queries {
  Queries(std::mt19937* rng, const SketchShape& shape, int rows, float size)
      : layout(SketchLayoutOf(shape.key_dim, shape.key_split)), width(layout.width[0] + layout.width[1]) {
    q = RandomValues(rng, size_t(rows) * shape.key_dim, size);
    codes.assign(size_t(rows + 15) / 16 * 16 * width, 77);
    scales.resize(size_t(2) * rows);
    sums.resize(size_t(2) * rows);
    for (int r = 0; r < rows; ++r) {
      SketchQuery(&q[size_t(r) * shape.key_dim], shape.key_dim, shape.key_split, &codes[size_t(r) * width],
                  &scales[size_t(2) * r], &sums[size_t(2) * r]);
    }
  }
  SketchLayout layout;
  int width;
  std::vector<float> q, scales;
  std::vector<int8_t> codes;
  std::vector<int32_t> sums;
};

// Estimates of q . (key - center) are unbiased, with an error of about sqrt(0.57 / dim) |q| |difference| for
// one plane. (pi / 2 - 1) / dim is the part of a random direction's square that its signs do not capture; the
// summary's center is known. Two planes leave 0.13. Parts have independent errors, so their squares add. The
// test checks the mean of all squared errors over many keys and queries.
TEST(SketchTest, EstimatesAreUnbiasedWithinBound) {
  std::mt19937 rng(1);
  for (const SketchShape& shape : kSketchShapes) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kI8}) {
      double errors = 0, allowed = 0, sum = 0, expected = 0;
      for (int i = 0; i < 8; ++i) {
        const Block block(&rng, shape, dtype);
        const Queries queries(&rng, shape, 4, 1);
        const auto* header = reinterpret_cast<const KeySummaryHeader*>(block.summary.data());
        const auto* centers = reinterpret_cast<const int8_t*>(header + 1);
        for (int j = 0; j < kBlockKeys; ++j) {
          for (int r = 0; r < 4; ++r) {
            double product = 0, q2[2] = {}, x2[2] = {};
            for (int d = 0; d < shape.key_dim; ++d) {
              const int part = d < shape.key_split ? 0 : 1;
              const double x =
                  block.keys[size_t(j) * shape.key_dim + d] - double{header->center_scale[part]} * centers[d];
              const double q = queries.q[size_t(r) * shape.key_dim + d];
              product += q * x, q2[part] += q * q, x2[part] += x * x;
            }
            // Computes one key's score alone, by the signs.
            int signs[2] = {};
            for (int d = 0; d < queries.width; ++d) {
              const std::byte* group = block.summary.data() + queries.layout.planes +
                                       d / 64 * kSketchStepBytes + j / 16 * int64_t{128};
              const int quad = d % 64 / 4;
              const auto byte = std::to_integer<int>(group[quad / 8 * 64 + j % 16 * 4 + d % 4]);
              signs[d < queries.layout.width[0] ? 0 : 1] +=
                  queries.codes[size_t(r) * queries.width + d] * ((byte >> quad % 8 & 1) != 0 ? 1 : -1);
            }
            const auto* factors =
                reinterpret_cast<const uint8_t*>(block.summary.data() + queries.layout.factors);
            double estimate = 0;
            for (int part = 0; part < (shape.key_split < shape.key_dim ? 2 : 1); ++part) {
              const int dim = part == 0 ? shape.key_split : shape.key_dim - shape.key_split;
              estimate += double{queries.scales[2 * r + part]} * signs[part] * header->sketch[part] *
                          factors[part * kBlockKeys + j];
              allowed += q2[part] * x2[part] * (dim <= 64 ? 0.14 : 0.57) / dim;
            }
            errors += (estimate - product) * (estimate - product);
            sum += estimate * product;
            expected += product * product;
          }
        }
      }
      EXPECT_LE(errors, 1.3 * allowed) << shape.key_dim << ", " << shape.key_split;
      EXPECT_NEAR(sum / expected, 1, 0.1) << shape.key_dim;
    }
  }
}

TEST(SketchTest, SupportsEqualAndZeroKeys) {
  std::mt19937 rng(2);
  for (const float value : {0.0F, 1e-42F, 3.0F, 1e16F}) {
    Block block(&rng, {40, 32}, DType::kF32);
    for (int j = 0; j < kBlockKeys; ++j) {
      for (int d = 0; d < 40; ++d) block.Put(j, d, value);
    }
    block.Make();
    const auto* header = reinterpret_cast<const KeySummaryHeader*>(block.summary.data());
    for (const float scale : header->sketch) {
      EXPECT_TRUE(std::isfinite(scale));
      EXPECT_LE(scale, value * 1e-5F);
    }
    EXPECT_EQ(block.summary[block.summary.size() - 16], std::byte{0x5a});
  }
}

// Number of scores for some rows, and the position of a row's score of a block.
size_t ScoreFloats(int rows, int stride) {
  return size_t(rows + kScoreGroup - 1) / kScoreGroup * stride * kScoreGroup;
}
size_t SketchScoreAt(int row, int block, int stride) {
  return (size_t(row / kScoreGroup) * stride + block) * kScoreGroup + row % kScoreGroup;
}

class SketchScoresTest : public testing::TestWithParam<runtime::Isa> {
 protected:
  KernelTable kernels_ = SelectKernels(*runtime::LimitTo(runtime::DetectCpu(), GetParam()));
};

// Products are integers, the same everywhere. An implementation's approximation of a power of two is at most
// 0.0861 of a power above it, and so is its logarithm: 0.06 in natural logarithms. Factors and sums are
// rounded a few times, to 2^-24 of estimates up to 69.
TEST_P(SketchScoresTest, MatchRef) {
  std::mt19937 rng(3);
  for (const SketchShape& shape : kSketchShapes) {
    for (const int rows : {1, 3, 8, 16, 21, 40, 130}) {
      if (rows == 130 && shape.key_dim != 40) continue;
      for (const float size : {0.2F, 3.0F, 100.0F}) {
        constexpr int kBlocks = 5, kStride = 8;
        std::vector<Block> blocks;
        for (int b = 0; b < kBlocks; ++b) blocks.emplace_back(&rng, shape, DType::kBF16);
        std::vector<const std::byte*> table;
        for (const Block& block : blocks) table.push_back(block.summary.data());
        const Queries queries(&rng, shape, rows, size);
        std::vector<float> ours = RandomValues(&rng, ScoreFloats(rows, kStride), 50), ref = ours;
        ours[2 * kScoreGroup] = ref[2 * kScoreGroup] = std::numeric_limits<float>::quiet_NaN();
        const std::vector<float> before = ours;
        for (auto* scores : {&ours, &ref}) {
          const SketchScores task = {.q = queries.codes.data(),
                                     .q_stride = queries.width,
                                     .q_scales = queries.scales.data(),
                                     .q_sums = queries.sums.data(),
                                     .summaries = table.data(),
                                     .rows = rows,
                                     .count = kBlocks,
                                     .layout = queries.layout,
                                     .scores = scores->data(),
                                     .stride = kStride};
          scores == &ours ? kernels_.sketch_scores(task) : ref::SketchScores(task);
        }
        for (int r = 0; r < rows; ++r) {
          for (int b = 0; b < kStride; ++b) {
            const size_t at = SketchScoreAt(r, b, kStride);
            if (r == 0 && b == 2) {
              EXPECT_TRUE(std::isnan(ours[at]));
            } else if (b >= kBlocks) {
              EXPECT_EQ(ours[at], before[at]);
            } else {
              ASSERT_NEAR(ours[at], ref[at], 0.0602) << shape.key_dim << " " << rows << " " << size;
            }
          }
        }
      }
    }
  }
}

// The query matches one key among unlike ones. Its block must have the best score, although its center tells
// nothing of the key. Products with the other keys are about 0, and their estimates have an error of a
// fifteenth of this key's product.
TEST_P(SketchScoresTest, FindsOneKeyAmongMany) {
  std::mt19937 rng(5);
  for (const SketchShape& shape : {SketchShape{64, 64}, SketchShape{128, 128}, SketchShape{576, 512}}) {
    constexpr int kBlocks = 40;
    std::vector<Block> blocks;
    for (int b = 0; b < kBlocks; ++b) blocks.emplace_back(&rng, shape, DType::kBF16, 0.0F);
    std::vector<const std::byte*> table;
    for (const Block& block : blocks) table.push_back(block.summary.data());
    for (const int wanted : {0, 7, 39}) {
      Queries queries(&rng, shape, 1, 1);
      const float* key = &blocks[wanted].keys[size_t(wanted + 11) * shape.key_dim];
      double squares = 0;
      for (int d = 0; d < shape.key_dim; ++d) squares += double{key[d]} * key[d];
      for (int d = 0; d < shape.key_dim; ++d) queries.q[d] = key[d] * static_cast<float>(17 / squares);
      SketchQuery(queries.q.data(), shape.key_dim, shape.key_split, queries.codes.data(),
                  queries.scales.data(), queries.sums.data());
      std::vector<float> scores(ScoreFloats(1, kBlocks), 0.0F);
      kernels_.sketch_scores({.q = queries.codes.data(),
                              .q_stride = queries.width,
                              .q_scales = queries.scales.data(),
                              .q_sums = queries.sums.data(),
                              .summaries = table.data(),
                              .rows = 1,
                              .count = kBlocks,
                              .layout = queries.layout,
                              .scores = scores.data(),
                              .stride = kBlocks});
      int best = 0;
      for (int b = 1; b < kBlocks; ++b) {
        if (scores[SketchScoreAt(0, b, kBlocks)] > scores[SketchScoreAt(0, best, kBlocks)]) best = b;
      }
      EXPECT_EQ(best, wanted) << shape.key_dim;
    }
  }
}

// A row's scores must not depend on the other rows and blocks.
TEST_P(SketchScoresTest, RowsAreIndependent) {
  std::mt19937 rng(4);
  for (const SketchShape& shape : kSketchShapes) {
    constexpr int kRows = 37, kBlocks = 6;
    std::vector<Block> blocks;
    for (int b = 0; b < kBlocks; ++b) blocks.emplace_back(&rng, shape, DType::kF32);
    std::vector<const std::byte*> table;
    for (const Block& block : blocks) table.push_back(block.summary.data());
    const Queries queries(&rng, shape, kRows, 1);
    const auto run = [&](int first, int rows, int block, int count) {
      std::vector<int8_t> codes(size_t(rows + 15) / 16 * 16 * queries.width, 99);
      std::copy_n(&queries.codes[size_t(first) * queries.width], rows * queries.width, codes.begin());
      std::vector<float> scores(ScoreFloats(rows, count), 0.5F);
      kernels_.sketch_scores({.q = codes.data(),
                              .q_stride = queries.width,
                              .q_scales = &queries.scales[size_t(2) * first],
                              .q_sums = &queries.sums[size_t(2) * first],
                              .summaries = &table[block],
                              .rows = rows,
                              .count = count,
                              .layout = queries.layout,
                              .scores = scores.data(),
                              .stride = count});
      return scores;
    };
    const std::vector<float> all = run(0, kRows, 0, kBlocks);
    for (const int r : {0, 7, 15, 16, 36}) {
      for (const int b : {0, 3, 5}) EXPECT_EQ(run(r, 1, b, 1)[0], all[SketchScoreAt(r, b, kBlocks)]);
    }
  }
}

std::vector<runtime::Isa> SketchIsas() {
  std::vector<runtime::Isa> found;
  for (const auto& impl : SketchScoresImpls()) {
    if (runtime::DetectCpu().Has(impl.needs)) found.push_back(impl.needs);
  }
  return found;
}
INSTANTIATE_TEST_SUITE_P(Host, SketchScoresTest, testing::ValuesIn(SketchIsas()), IsaTestName);

}  // namespace
}  // namespace moesaic::kernels
