#include "quantizer/format/grid.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "checkpoint/safetensors.h"
#include "quantizer/test_context.h"
#include "runtime/memory.h"
#include "tensor/dtype.h"
#include "tensor/group_format.h"

namespace moesaic::quantizer {
namespace {

constexpr Grid kInt8{GridKind::kInt8Channel, 0}, kInt4{GridKind::kInt4Group, 32},
    kNvfp4{GridKind::kNvfp4, 16}, kFp8{GridKind::kFp8Block, 128}, kInt8Group{GridKind::kInt8Group, 32};
constexpr Grid kRoundingGrids[] = {kInt8, kInt4,      {GridKind::kInt4Group, 128}, kNvfp4,
                                   kFp8,  kInt8Group, {GridKind::kInt8Group, 128}, {GridKind::kInt8Group, 0}};

std::vector<float> Values(const QuantizedMatrix& matrix) {
  std::vector<float> values(static_cast<size_t>(matrix.n) * matrix.k);
  Dequantize(matrix, 0, matrix.n, values.data());
  return values;
}

double ErrorOf(const std::vector<float>& a, const std::vector<float>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += std::pow(double{a[i]} - b[i], 2);
  return sum;
}

// Each of the 16 codes times each of the 254 finite block scales gives the exact product, which rounds back
// to its code.
TEST(Grid, RoundTripsAllNvfp4CodesWithAllScales) {
  QuantizedMatrix matrix{
      .grid = kNvfp4, .n = 256, .k = 16, .codes = {}, .scales = {}, .global_scale = 0.375F};
  for (int scale = 0; scale < 256; ++scale) {
    const float value = tensor::F8E4M3ToFloat(static_cast<uint8_t>(scale));
    matrix.scales.push_back(std::isnan(value) ? 1 : value);
    for (uint8_t code = 0; code < 16; ++code) matrix.codes.push_back(code);
  }
  const std::vector<float> values = Values(matrix);
  for (int scale = 0; scale < 256; ++scale) {
    for (int code = 0; code < 16; ++code) {
      const float unit = static_cast<float>(double{matrix.scales[scale]} / double{matrix.global_scale});
      const auto exact = static_cast<float>(double{unit} * tensor::kE2M1[code]);
      EXPECT_EQ(values[scale * 16 + code], exact) << scale << " " << code;
      if (unit > 0) {
        EXPECT_EQ(tensor::FloatToE2M1(exact / unit), code);
      }
    }
  }
}

// Compares with the compressed-tensors package (tests/golden/compressed_tensors_grids.py). Its codes and
// scales have the same values here, and rounding to the nearest gives the same codes. Int8 differs: its scale
// maps the largest magnitude to 127.5, and ours to 127, so that no code is -128.
TEST(Grid, AgreesWithCompressedTensors) {
  const std::string path = MOESAIC_SOURCE_DIR "/tests/golden/grids.safetensors";
  const auto mapped = runtime::MappedFile::Open(path);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  const auto file = checkpoint::ParseSafetensors((*mapped)->bytes(), path);
  ASSERT_TRUE(file.ok()) << file.status();
  const auto entry = [&](const std::string& name) -> const checkpoint::TensorEntry& {
    return *std::find_if(file->tensors.begin(), file->tensors.end(),
                         [&](const auto& t) { return t.name == name; });
  };
  const auto floats = [&](const std::string& name) {
    std::vector<float> values(entry(name).bytes.size() / sizeof(float));
    std::memcpy(values.data(), entry(name).bytes.data(), entry(name).bytes.size());
    return values;
  };
  const std::vector<float> weights = floats("weights");
  const TestContext threads(2);
  for (const auto& [name, grid] :
       {std::pair("int8", kInt8), {"int4", kInt4}, {"nvfp4", kNvfp4}, {"fp8", kFp8}}) {
    const std::string scheme = name;
    QuantizedMatrix theirs{
        .grid = grid, .n = 24, .k = 160, .codes = {}, .scales = floats(scheme + ".scales")};
    const auto codes = entry(scheme + ".codes").bytes;
    for (const std::byte code : codes) theirs.codes.push_back(static_cast<uint8_t>(code));
    if (scheme == "nvfp4") theirs.global_scale = floats("nvfp4.global_scale")[0];
    EXPECT_EQ(Values(theirs), floats(scheme + ".values")) << scheme;
    const auto ours = RoundToNearest(threads.ctx, grid, weights.data(), 24, 160, {});
    ASSERT_TRUE(ours.ok()) << ours.status();
    if (scheme == "int8") {
      for (int r = 0; r < 24; ++r)
        EXPECT_NEAR(ours->scales[r], theirs.scales[r] * 127.5F / 127, 0x1p-7F * ours->scales[r]);
      continue;
    }
    EXPECT_EQ(ours->global_scale, theirs.global_scale);
    EXPECT_EQ(ours->scales, theirs.scales) << scheme;
    EXPECT_EQ(Values(*ours), Values(theirs)) << scheme;
  }
}

// A group has the codes and scale of a row with its inputs alone.
TEST(Grid, Int8GroupsRoundLikeChannelsOfTheirInputs) {
  const TestContext threads(2);
  const int n = 17, k = 256;
  const std::vector<float> weights = TestWeights(n, k, 11);
  for (const int group : {0, 32, 64, 128}) {
    for (const bool by_error : {false, true}) {
      const int inputs = group > 0 ? group : k;
      const auto whole =
          RoundToNearest(threads.ctx, {GridKind::kInt8Group, group}, weights.data(), n, k, {by_error, {}, 0});
      const auto parts = RoundToNearest(threads.ctx, kInt8, weights.data(), n * k / inputs, inputs,
                                        {by_error, {}, 0});  // borrows the same memory
      ASSERT_TRUE(whole.ok() && parts.ok());
      EXPECT_EQ(whole->codes, parts->codes) << group;
      EXPECT_EQ(whole->scales, parts->scales) << group;
      EXPECT_EQ(Values(*whole), Values(*parts)) << group;
    }
  }
}

TEST(Grid, ScalesAreExactInTheStoredDtype) {
  const TestContext threads(2);
  const std::vector<float> weights = TestWeights(130, 256, 1);
  for (const Grid& grid : kRoundingGrids) {
    for (const bool by_error : {false, true}) {
      const auto matrix = RoundToNearest(threads.ctx, grid, weights.data(), 130, 256, {by_error, {}, 0});
      ASSERT_TRUE(matrix.ok());
      for (const float scale : matrix->scales) {
        const float stored = grid.kind == GridKind::kNvfp4
                                 ? tensor::F8E4M3ToFloat(tensor::FloatToF8E4M3(scale))
                                 : tensor::ToFloat(tensor::ToBF16(scale));
        EXPECT_EQ(scale, stored);
      }
    }
  }
}

TEST(Grid, SearchedScalesHaveLessError) {
  const TestContext threads(2);
  const int n = 200, k = 384;
  const std::vector<float> weights = TestWeights(n, k, 2);
  for (const Grid& grid : kRoundingGrids) {
    const auto plain = RoundToNearest(threads.ctx, grid, weights.data(), n, k, {});
    const auto searched = RoundToNearest(threads.ctx, grid, weights.data(), n, k, {true, {}, 0});
    const double before = ErrorOf(weights, Values(*plain)), after = ErrorOf(weights, Values(*searched));
    // Codes of many bits gain little; ties may be rounded differently.
    const bool four_bits = grid.kind == GridKind::kInt4Group || grid.kind == GridKind::kNvfp4;
    EXPECT_LE(after, before * (four_bits ? 0.85 : 1.00001)) << static_cast<int>(grid.kind);
  }
}

TEST(Grid, ImportanceMovesErrorToLessImportantInputs) {
  const TestContext threads(2);
  const int n = 64, k = 128;
  const std::vector<float> weights = TestWeights(n, k, 3);
  std::vector<float> importance(k);
  for (int c = 0; c < k; ++c) importance[c] = c % 4 == 0 ? 100 : 1;
  const auto weighted = [&](const QuantizedMatrix& matrix) {
    const std::vector<float> values = Values(matrix);
    double sum = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      sum += importance[i % k] * std::pow(double{values[i]} - weights[i], 2);
    }
    return sum;
  };
  for (const Grid& grid : {kInt8, kInt4, kNvfp4, kInt8Group}) {
    const auto even = RoundToNearest(threads.ctx, grid, weights.data(), n, k, {true, {}, 0});
    const auto uneven = RoundToNearest(threads.ctx, grid, weights.data(), n, k, {true, importance, 0});
    EXPECT_LT(weighted(*uneven), weighted(*even)) << static_cast<int>(grid.kind);
  }
}

TEST(Grid, ErrorsStayWithinHalfAStep) {
  const TestContext threads(2);
  const int n = 130, k = 384;
  const std::vector<float> weights = TestWeights(n, k, 4);
  // The widest step below the largest number, in units of the scale; and the largest magnitude's distance
  // beyond that number after its scale is rounded: 2^-8 of itself (bf16) or 2^-4 (e4m3).
  const auto bound = [](GridKind kind, float q) -> float {
    switch (kind) {
      case GridKind::kInt8Channel:
      case GridKind::kInt8Group:
        return 0.5F + 127 * 0x1p-8F;
      case GridKind::kInt4Group:
        return 0.5F + 7.5F * 0x1p-8F;
      case GridKind::kNvfp4:
        return q < 2 ? 0.25F : (q < 4 ? 0.5F : 1.0F);
      default:
        return std::max(0x1p-10F, q * 0x1p-4F);
    }
  };
  for (const Grid& grid : kRoundingGrids) {
    const auto matrix = RoundToNearest(threads.ctx, grid, weights.data(), n, k, {});
    const std::vector<float> values = Values(*matrix);
    for (int i = 0; i < n * k; ++i) {
      const float scale = matrix->Scale(i / k, i % k), q = std::fabs(weights[i]) / scale;
      EXPECT_LE(std::fabs(values[i] - weights[i]) / scale, bound(grid.kind, q) * 1.0001F) << i;
    }
  }
}

TEST(Grid, ResultDoesNotDependOnRowRunsOrThreads) {
  const int n = 300, k = 256;
  const std::vector<float> weights = TestWeights(n, k, 5);
  const TestContext one(1), three(3);
  const float global = Nvfp4GlobalScale(*LargestMagnitude(one.ctx, weights.data(), n, k), true);
  for (const Grid& grid : kRoundingGrids) {
    const ScaleSearch search{.by_error = true, .importance = {}, .global_scale = global};
    const auto whole = RoundToNearest(one.ctx, grid, weights.data(), n, k, search);
    const auto threaded = RoundToNearest(three.ctx, grid, weights.data(), n, k, search);
    EXPECT_EQ(whole->codes, threaded->codes);
    EXPECT_EQ(whole->scales, threaded->scales);
    std::vector<uint8_t> codes;
    std::vector<float> scales;
    for (const int first : {0, 128, 256}) {
      const int count = std::min(128, n - first);
      const auto part = RoundToNearest(three.ctx, grid, weights.data() + first * k, count, k, search);
      codes.insert(codes.end(), part->codes.begin(), part->codes.end());
      scales.insert(scales.end(), part->scales.begin(), part->scales.end());
    }
    EXPECT_EQ(whole->codes, codes);
    EXPECT_EQ(whole->scales, scales);
  }
}

TEST(Grid, TinyAndZeroWeightsStayFinite) {
  const TestContext threads(1);
  for (const float magnitude : {0.0F, 1e-45F, 1e-40F, 1e-30F, 1e-8F, 0x1p95F}) {
    std::vector<float> weights(128 * 128, 0.0F);
    weights[7] = magnitude;
    weights[128 * 5 + 3] = -magnitude / 2;
    for (const Grid& grid : kRoundingGrids) {
      for (const bool by_error : {false, true}) {
        const auto matrix = RoundToNearest(threads.ctx, grid, weights.data(), 128, 128, {by_error, {}, 0});
        ASSERT_TRUE(matrix.ok());
        EXPECT_TRUE(std::isfinite(matrix->global_scale) && matrix->global_scale > 0);
        for (const float value : Values(*matrix)) {
          EXPECT_TRUE(std::isfinite(value));
          EXPECT_LE(std::fabs(value), magnitude * 1.2F + 0x1p-126F);
        }
      }
    }
  }
}

TEST(Grid, ErrorStatesThePositionOfANonFiniteWeight) {
  const TestContext threads(2);
  for (const float bad : {NAN, INFINITY, -INFINITY, 0x1p96F}) {
    std::vector<float> weights = TestWeights(8, 128, 6);
    weights[3 * 128 + 17] = bad;
    for (const Grid& grid : kRoundingGrids) {
      const auto matrix = RoundToNearest(threads.ctx, grid, weights.data(), 8, 128, {});
      EXPECT_EQ(matrix.status().code(), StatusCode::kDataLoss);
      EXPECT_THAT(Message(matrix.status()), testing::HasSubstr("output 3, input 17"));
    }
  }
}

TEST(Grid, RejectsGroupSizesThatNoLoaderSupports) {
  EXPECT_THAT(Message(CheckGrid({GridKind::kInt4Group, 48}, 96)), testing::HasSubstr("32, 64 or 128"));
  EXPECT_THAT(Message(CheckGrid({GridKind::kNvfp4, 32}, 96)), testing::HasSubstr("16"));
  EXPECT_THAT(Message(CheckGrid(kInt4, 100)), testing::HasSubstr("100 inputs"));
  EXPECT_TRUE(CheckGrid(kFp8, 100).ok());
}

}  // namespace
}  // namespace moesaic::quantizer
