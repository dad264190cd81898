// Products of row-major matrices and the softmax of rows on every instruction set of the host.
#include "science/row_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "science/test_graphs.h"

namespace moesaic::graph {
namespace {

class RowKernelsTest : public testing::TestWithParam<runtime::Isa> {};

INSTANTIATE_TEST_SUITE_P(Isa, RowKernelsTest, testing::ValuesIn(GraphIsas()),
                         [](const auto& info) { return runtime::IsaName(info.param); });

TEST_P(RowKernelsTest, ProductsMatchDouble) {
  const auto workspace = MakeWorkspace(GetParam(), 1);
  const MatmulFn matmul = workspace->context().graph->rows.matmul;
  std::mt19937 rng(3);
  std::uniform_real_distribution<float> uniform(-1, 1);
  // Rows from 24 on are multiplied by packed panels; 12 and 24 columns are one and a half vectors.
  for (const int64_t m : {1, 5, 23, 24, 37}) {
    for (const int64_t n : {1, 12, 16, 24, 29, 44}) {
      for (const int64_t k : {1, 40, 520}) {
        for (const bool accumulate : {false, true}) {
          const int64_t a_stride = k + 3, c_stride = n + 1;
          std::vector<float> a(m * a_stride), b(k * n), c(m * c_stride);
          for (auto* x : {&a, &b, &c})
            for (float& value : *x) value = uniform(rng);
          const std::vector<float> before = c;
          matmul({.a = a.data(),
                  .b = b.data(),
                  .c = c.data(),
                  .a_stride = a_stride,
                  .b_stride = n,
                  .c_stride = c_stride,
                  .m = m,
                  .n = n,
                  .k = k,
                  .accumulate = accumulate,
                  .prefetch_a = true});
          for (int64_t i = 0; i < m; ++i) {
            for (int64_t j = 0; j < n; ++j) {
              double sum = accumulate ? before[i * c_stride + j] : 0, magnitude = std::abs(sum);
              for (int64_t l = 0; l < k; ++l) {
                const double term = double{a[i * a_stride + l]} * b[l * n + j];
                sum += term;
                magnitude += std::abs(term);
              }
              // Each of k + 1 roundings is at most 2^-24 of a partial sum.
              ASSERT_NEAR(c[i * c_stride + j], sum, std::ldexp(static_cast<double>(k + 1), -24) * magnitude)
                  << m << " x " << n << " x " << k << ", row " << i << ", column " << j;
            }
            ASSERT_EQ(c[i * c_stride + n], before[i * c_stride + n]);  // the column after the result
          }
        }
      }
    }
  }
}

TEST_P(RowKernelsTest, SoftmaxKeepsNanAndClearsMaskedElements) {
  constexpr float kMasked = -std::numeric_limits<float>::infinity(),
                  kNan = std::numeric_limits<float>::quiet_NaN();
  const auto workspace = MakeWorkspace(GetParam(), 1);
  const SoftmaxRowFn softmax = workspace->context().graph->rows.softmax;
  for (const int n : {1, 7, 16, 37}) {
    std::vector<float> masked(n, kMasked), nan(n, kNan), one_nan(n, kMasked), some(n, kMasked);
    one_nan[n / 2] = kNan;
    some[n / 2] = 3;
    for (auto* row : {&masked, &nan, &one_nan, &some}) softmax(row->data(), n);
    for (int i = 0; i < n; ++i) {
      EXPECT_EQ(masked[i], 0) << i << " of " << n;
      EXPECT_TRUE(std::isnan(nan[i])) << i << " of " << n;
      EXPECT_TRUE(std::isnan(one_nan[i])) << i << " of " << n;
      EXPECT_EQ(some[i], i == n / 2 ? 1 : 0) << i << " of " << n;
    }
  }
}

}  // namespace
}  // namespace moesaic::graph
