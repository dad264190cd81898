#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <tuple>

#include "kernels/gemm_tiling.h"
#include "kernels/test_context.h"

namespace moesaic::kernels {
namespace {

using tensor::PackedFormat;

constexpr PackedFormat kFormats[] = {PackedFormat::kF32,   PackedFormat::kBF16,  PackedFormat::kI8,
                                     PackedFormat::kI4G32, PackedFormat::kNvfp4, PackedFormat::kF8G128};

class LinearTest : public testing::TestWithParam<runtime::Isa> {
 protected:
  std::mt19937 rng_{11};
};

// Computes C by one call of the tile kernel over everything, which gemm_test.cc compares with exact sums.
std::vector<float> WholeProduct(const ExecContext& ctx, const QuantizedActivations& a,
                                const tensor::PackedMatrix& w) {
  std::vector<float> c(size_t(a.rows) * w.n());
  const GemmTile tile = TileOf(a, 0, a.rows, w, 0, 0, w.layout.panels(), c.data(), w.n());
  ctx.kernels->gemm[static_cast<int>(a.format)].tile(tile);
  return c;
}

TEST_P(LinearTest, TilingDoesNotChangeResults) {
  for (int threads : {1, 3}) {
    TestContext test(GetParam(), threads);
    const ExecContext ctx = test.context();
    for (PackedFormat format : kFormats) {
      for (const auto& [m, n, k] :
           {std::tuple{1, 1, 1}, {1, 1000, 300}, {7, 333, 65}, {150, 100, 100}, {500, 40, 2000}}) {
        const TestMatrix w = RandomMatrix(&rng_, format, n, k);
        const auto x = RandomValues(&rng_, size_t(m) * (k + 5), 1);
        const size_t mark = test.scratch_mark();
        const QuantizedActivations a = QuantizeActivations(ctx, format, x.data(), k + 5, m, k);
        std::vector<float> c(size_t(m) * (n + 1), -7.0F);
        Linear(ctx, {.a = &a, .w = &w.matrix, .c = c.data(), .c_stride = n + 1});
        const auto expected = WholeProduct(ctx, a, w.matrix);
        for (int row = 0; row < m; ++row) {
          ASSERT_EQ(std::memcmp(&c[row * (n + 1)], &expected[row * n], n * sizeof(float)), 0)
              << PackedFormatName(format) << " " << m << "x" << n << "x" << k << " row " << row;
          ASSERT_EQ(c[row * (n + 1) + n], -7);
        }
        ctx.scratch->Rewind(mark);
      }
    }
  }
}

TEST_P(LinearTest, QuantizesRowsAtAnyStride) {
  TestContext test(GetParam(), 2);
  const ExecContext ctx = test.context();
  const int k = 1030;
  const auto x = RandomValues(&rng_, 40 * 1100, 1);
  for (PackedFormat format : kFormats) {
    for (int rows : {0, 1, 40}) {  // serial and pooled
      const QuantizedActivations a = QuantizeActivations(ctx, format, x.data(), 1100, rows, k);
      EXPECT_EQ(a.rows, rows);
      std::vector<std::byte> row(a.stride);
      for (int r = 0; r < rows; ++r) {
        const auto& gemm = ctx.kernels->gemm[static_cast<int>(format)];
        const float scale = gemm.prepare(&x[r * 1100], k, a.k_padded, {}, row.data());
        EXPECT_EQ(scale, a.scales[r]);
        EXPECT_EQ(std::memcmp(row.data(), &a.data[r * a.stride], a.k_padded / 64 * gemm.unit_bytes), 0);
      }
    }
  }
}

// Tests a group of slices of one matrix with different inputs, like per-head products, with bias and
// accumulation.
TEST_P(LinearTest, GroupsSlicesWithBiasAndAccumulation) {
  TestContext test(GetParam(), 3);
  const ExecContext ctx = test.context();
  const int heads = 5, per_head = 48, k = 96, m = 4;
  for (PackedFormat format : kFormats) {
    const TestMatrix w = RandomMatrix(&rng_, format, heads * per_head, k);
    const auto bias = RandomValues(&rng_, heads * per_head, 1);
    const auto before = RandomValues(&rng_, m * heads * per_head, 1);
    const auto x = RandomValues(&rng_, m * heads * k, 1);
    std::vector<float> c = before;
    std::vector<QuantizedActivations> a(heads);
    std::vector<tensor::PackedMatrix> slices(heads);
    std::vector<LinearParams> group(heads);
    for (int h = 0; h < heads; ++h) {
      a[h] = QuantizeActivations(ctx, format, &x[h * k], heads * k, m, k);
      slices[h] = w.matrix.Rows(h * per_head, per_head);
      group[h] = {.a = &a[h],
                  .w = &slices[h],
                  .bias = &bias[h * per_head],
                  .c = &c[h * per_head],
                  .c_stride = heads * per_head,
                  .accumulate = h % 2 == 1};
    }
    LinearGroup(ctx, group);
    for (int h = 0; h < heads; ++h) {
      const auto product = WholeProduct(ctx, a[h], slices[h]);
      for (int row = 0; row < m; ++row) {
        for (int j = 0; j < per_head; ++j) {
          const int at = row * heads * per_head + h * per_head + j;
          const float with_bias = product[row * per_head + j] + bias[h * per_head + j];
          ASSERT_EQ(c[at], h % 2 == 1 ? before[at] + with_bias : with_bias);
        }
      }
    }
  }
}

TEST_P(LinearTest, AcceptsNoRowsAndNoProducts) {
  TestContext test(GetParam(), 2);
  const TestMatrix w = RandomMatrix(&rng_, PackedFormat::kF32, 16, 16);
  const QuantizedActivations a = QuantizeActivations(test.context(), PackedFormat::kF32, nullptr, 16, 0, 16);
  Linear(test.context(), {.a = &a, .w = &w.matrix, .c = nullptr, .c_stride = 16});
  LinearGroup(test.context(), {});
}

INSTANTIATE_TEST_SUITE_P(Host, LinearTest, testing::ValuesIn(runtime::HostIsas(runtime::DetectCpu())),
                         IsaTestName);

// Every tiling must cover the product, stay within the cache sizes and use every thread where possible.
TEST(TileGemm, CoversProductBalancedWithinCacheSizes) {
  for (PackedFormat format : kFormats) {
    for (int n : {1, 16, 100, 768, 4096, 150000}) {
      for (int k : {1, 512, 2048, 7168, 65536}) {
        for (int rows : {1, 5, 32, 300, 2000}) {
          for (int threads : {1, 2, 64}) {
            const auto layout = tensor::PackedLayout::Of(format, n, k);
            const GemmTiling tiling = TileGemm(rows, {.layout = layout}, threads, 1, {});
            ASSERT_GE(tiling.row_tile, 1);
            ASSERT_GE(tiling.panel_group, 1);
            ASSERT_LE(tiling.panel_group, tiling.panels);
            ASSERT_LE(tiling.row_tile, rows);
            const int64_t group_bytes = tiling.panel_group * layout.panel_bytes;
            ASSERT_TRUE(group_bytes <= 512 << 10 || tiling.panel_group == 1);
            const bool large = layout.panels() * layout.panel_bytes >= int64_t{threads} * (256 << 10);
            if (large && tiling.panels >= 4 * threads) {
              ASSERT_GE(tiling.tasks(), threads);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace moesaic::kernels
