// Scatter, segment, index_add and softmax of every instruction set against sums in double.
#include "science/segment_ops.h"

#include <gtest/gtest.h>

#include <limits>
#include <memory>

#include "science/test_graphs.h"

namespace moesaic::graph {
namespace {

constexpr Reduce kReductions[] = {Reduce::kSum, Reduce::kMean, Reduce::kMax, Reduce::kMin};
constexpr tensor::DType kTypes[] = {tensor::DType::kF32, tensor::DType::kBF16, tensor::DType::kF16};
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct ExpectedElement {
  double value = 0, magnitude = 0;
  int32_t arg = 0;
};

// The reduction of one element, its sum of magnitudes for the error bound, and its edge.
ExpectedElement ReduceElement(Reduce reduce, const TestFeatures& src, const std::vector<int32_t>& index,
                              int32_t segment, int64_t col) {
  ExpectedElement expected;
  expected.arg = static_cast<int32_t>(index.size());
  int count = 0;
  for (size_t e = 0; e < index.size(); ++e) {
    if (index[e] != segment) continue;
    const double x = src.at(static_cast<int64_t>(e), col);
    const bool first = count++ == 0;
    if (reduce == Reduce::kSum || reduce == Reduce::kMean) {
      expected.value += x;
      expected.magnitude += std::abs(x);
    } else if (first || (reduce == Reduce::kMax ? x > expected.value : x < expected.value)) {
      expected.value = x;
      expected.arg = static_cast<int32_t>(e);
    }
  }
  if (reduce == Reduce::kMean) expected.value /= std::max(1, count);
  expected.magnitude *= count;  // every one of `count` additions may round the whole sum
  return expected;
}

class SegmentOpsTest : public testing::TestWithParam<runtime::Isa> {
 protected:
  std::unique_ptr<Workspace> workspace_ = MakeWorkspace(GetParam(), 2);
  Context ctx_ = workspace_->context();
  std::mt19937 rng_{7};
};
INSTANTIATE_TEST_SUITE_P(Isa, SegmentOpsTest, testing::ValuesIn(GraphIsas()),
                         [](const auto& info) { return runtime::IsaName(info.param); });

TEST_P(SegmentOpsTest, ScatterMatchesDouble) {
  for (const tensor::DType dtype : kTypes) {
    for (const int64_t cols : {1, 3, 8, 16, 17, 31, 64, 100, 256}) {
      const std::vector<int32_t> index = RandomEdges(&rng_, 1, 23, 200).dst;
      const TestFeatures src = TestFeatures::Random(&rng_, dtype, 200, cols, cols % 3);
      for (const Reduce reduce : kReductions) {
        const bool extreme = reduce == Reduce::kMax || reduce == Reduce::kMin;
        TestFeatures out(dtype, 23, cols, 5);
        std::vector<int32_t> arg(extreme ? 23 * cols : 0);
        ASSERT_TRUE(
            Scatter(ctx_, reduce, src.view(), Indices::Of(index.data(), 200), out.out(), {.arg = arg}).ok());
        for (int32_t s = 0; s < 23; ++s) {
          for (int64_t c = 0; c < cols; ++c) {
            const ExpectedElement want = ReduceElement(reduce, src, index, s, c);
            const double bound = Unit(dtype) * std::abs(want.value) + 0x1p-24 * want.magnitude;
            ASSERT_NEAR(out.at(s, c), want.value, bound) << "segment " << s << " column " << c;
            if (extreme) {
              ASSERT_EQ(arg[s * cols + c], want.arg) << "segment " << s << " column " << c;
            }
          }
        }
      }
    }
  }
}

TEST_P(SegmentOpsTest, HubsMatchDoubleForAnyNumberOfThreads) {
  const int64_t cols = 24;
  const std::vector<int32_t> index = RandomEdges(&rng_, 1, 40, 20000, true).dst;
  TestFeatures src = TestFeatures::Random(&rng_, tensor::DType::kF32, 20000, cols);
  for (const Reduce reduce : kReductions) {
    const bool extreme = reduce == Reduce::kMax || reduce == Reduce::kMin;
    std::vector<TestFeatures> results;
    std::vector<std::vector<int32_t>> args;
    for (const int threads : {1, 2, 5}) {
      const auto workspace = MakeWorkspace(GetParam(), threads);
      results.emplace_back(tensor::DType::kF32, 40, cols);
      args.emplace_back(extreme ? 40 * cols : 0);
      ASSERT_TRUE(Scatter(workspace->context(), reduce, src.view(), Indices::Of(index.data(), 20000),
                          results.back().out(), {.arg = args.back()})
                      .ok());
    }
    EXPECT_EQ(results[0].bytes(), results[1].bytes());
    EXPECT_EQ(results[0].bytes(), results[2].bytes());
    EXPECT_EQ(args[0], args[2]);
    for (int64_t c = 0; c < cols; ++c) {
      const ExpectedElement want = ReduceElement(reduce, src, index, 1, c);
      EXPECT_NEAR(results[0].at(1, c), want.value,
                  1e-5 * std::max(1.0, std::abs(want.value)) + 0x1p-24 * 1e4);
      if (extreme) {
        EXPECT_EQ(args[0][cols + c], want.arg);
      }
    }
  }
}

TEST_P(SegmentOpsTest, LargeResultsAreStoredAtAnyAlignment) {
  const int64_t rows = 36000, cols = 68, edges = 3000;  // whole vectors and a rest; most segments are empty
  const std::vector<int32_t> index = RandomEdges(&rng_, 1, rows, edges).dst;
  const TestFeatures src = TestFeatures::Random(&rng_, tensor::DType::kF32, edges, cols);
  std::vector<double> want(rows * cols);
  for (int64_t e = 0; e < edges; ++e) {
    for (int64_t c = 0; c < cols; ++c) want[index[e] * cols + c] += src.at(e, c);
  }
  for (const int64_t stride : {int64_t{80}, cols}) {
    for (const size_t offset : {0, 1}) {
      std::vector<float> memory(rows * stride + 32, -7);
      void* aligned = memory.data();
      size_t space = memory.size() * sizeof(float);
      float* out = static_cast<float*>(std::align(64, 64, aligned, space)) + offset;
      ASSERT_TRUE(Scatter(ctx_, Reduce::kSum, src.view(), Indices::Of(index.data(), edges),
                          {.data = out, .rows = rows, .cols = cols, .stride = stride})
                      .ok());
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < stride; ++c)
          ASSERT_NEAR(out[r * stride + c], c < cols ? want[r * cols + c] : -7, 1e-5) << r << " " << c;
      }
    }
  }
}

TEST_P(SegmentOpsTest, AlphaAndBetaScaleSums) {
  const std::vector<int64_t> index = {1, 1, 0};
  TestFeatures src(tensor::DType::kF32, 3, 2), out(tensor::DType::kF32, 3, 2);
  src.Fill(2);
  out.Fill(10);
  ASSERT_TRUE(Scatter(ctx_, Reduce::kSum, src.view(), Indices::Of(index.data(), 3), out.out(),
                      {.alpha = 3, .beta = 0.5})
                  .ok());
  EXPECT_EQ(out.at(0, 0), 11);
  EXPECT_EQ(out.at(1, 1), 17);
  EXPECT_EQ(out.at(2, 0), 5);
  ASSERT_TRUE(IndexAdd(ctx_, out.out(), Indices::Of(index.data(), 3), src.view(), -1).ok());
  EXPECT_EQ(out.at(1, 1), 13);
  EXPECT_EQ(out.at(2, 0), 5);
}

TEST_P(SegmentOpsTest, EmptySegmentsGiveZeroAndNanWins) {
  const std::vector<int32_t> ptr = {0, 0, 3, 3};
  TestFeatures src(tensor::DType::kF32, 3, 1), out(tensor::DType::kF32, 3, 1);
  src.Set(0, 0, -5);
  src.Set(1, 0, kNan);
  src.Set(2, 0, -4);
  const Segments segments = *SegmentsFromPtr(Indices::Of(ptr.data(), 4), 3);
  for (const Reduce reduce : kReductions) {
    const bool extreme = reduce == Reduce::kMax || reduce == Reduce::kMin;
    std::vector<int32_t> arg(extreme ? 3 : 0);
    out.Fill(9);
    ASSERT_TRUE(Segment(ctx_, reduce, segments, src.view(), out.out(), {.arg = arg}).ok());
    EXPECT_EQ(out.at(0, 0), 0);
    EXPECT_EQ(out.at(2, 0), 0);
    EXPECT_TRUE(std::isnan(out.at(1, 0)));
    if (extreme) {
      EXPECT_EQ(arg, (std::vector<int32_t>{3, 1, 3}));
    }
  }
}

// In each column the first NaN is chosen: of whole vectors and of a rest, and of the parts of a hub.
TEST_P(SegmentOpsTest, NanWinsInWholeVectorsAndInHubs) {
  constexpr int kCols = 37;
  const std::vector<int32_t> ptr = {0, 10000, 10006};
  std::vector<int32_t> index(10000, 0);
  index.resize(10006, 1);
  const Segments segments = *SegmentsFromPtr(Indices::Of(ptr.data(), 3), 10006);
  ASSERT_EQ(segments.hubs, std::vector<int32_t>{0});
  auto first_nan = [](int segment, int col) {  // -1: the column has none
    constexpr int kEdgesOfHub[] = {-1, 0, 5000, 8200};
    if (segment == 0) return kEdgesOfHub[col % 4];
    return col % 6 == 5 ? -1 : 10000 + col % 6;
  };
  for (const tensor::DType dtype : kTypes) {
    TestFeatures src = TestFeatures::Random(&rng_, dtype, 10006, kCols);
    for (int s = 0; s < 2; ++s) {
      for (int c = 0; c < kCols; ++c) {
        if (first_nan(s, c) < 0) continue;
        src.Set(first_nan(s, c), c, kNan);
        src.Set(ptr[s + 1] - 1, c, kNan);
      }
    }
    for (const Reduce reduce : kReductions) {
      const bool extreme = reduce == Reduce::kMax || reduce == Reduce::kMin;
      TestFeatures out(dtype, 2, kCols);
      std::vector<int32_t> arg(extreme ? 2 * kCols : 0);
      ASSERT_TRUE(Segment(ctx_, reduce, segments, src.view(), out.out(), {.arg = arg}).ok());
      for (int s = 0; s < 2; ++s) {
        for (int c = 0; c < kCols; ++c) {
          const int nan = first_nan(s, c);
          ASSERT_EQ(std::isnan(out.at(s, c)), nan >= 0) << s << " " << c;
          if (!extreme) continue;
          const ExpectedElement want = ReduceElement(reduce, src, index, s, c);
          ASSERT_EQ(arg[s * kCols + c], nan >= 0 ? nan : want.arg) << s << " " << c;
          if (nan < 0) {
            ASSERT_EQ(out.at(s, c), want.value) << s << " " << c;
          }
        }
      }
    }
  }
}

TEST_P(SegmentOpsTest, BackwardOfEveryReductionMatchesDefinition) {
  for (const tensor::DType dtype : kTypes) {
    for (const int64_t cols : {1, 5, 33}) {
      const std::vector<int32_t> index = RandomEdges(&rng_, 1, 11, 90).dst;
      const Segments segments = *GroupByIndex(Indices::Of(index.data(), 90), 11);
      const TestFeatures src = TestFeatures::Random(&rng_, dtype, 90, cols);
      const TestFeatures grad = TestFeatures::Random(&rng_, dtype, 11, cols, 2);
      for (const Reduce reduce : kReductions) {
        const bool extreme = reduce == Reduce::kMax || reduce == Reduce::kMin;
        std::vector<int32_t> arg(extreme ? 11 * cols : 0);
        TestFeatures out(dtype, 11, cols), got(dtype, 90, cols, 3), rounded(dtype, 1, 1);
        ASSERT_TRUE(Segment(ctx_, reduce, segments, src.view(), out.out(), {.arg = arg}).ok());
        ASSERT_TRUE(SegmentBackward(ctx_, reduce, segments, grad.view(), arg, got.out()).ok());
        for (int64_t e = 0; e < 90; ++e) {
          for (int64_t c = 0; c < cols; ++c) {
            const int32_t s = index[e];
            float want = grad.at(s, c);
            if (reduce == Reduce::kMean) want /= static_cast<float>(segments.ptr[s + 1] - segments.ptr[s]);
            if (extreme && arg[s * cols + c] != e) want = 0;
            rounded.Set(0, 0, want);  // gradients of sums, maxima and minima are copied: rounding keeps them
            ASSERT_EQ(got.at(e, c), rounded.at(0, 0));
            ASSERT_NEAR(got.at(e, c), want, Unit(dtype) * std::abs(want));
          }
        }
      }
    }
  }
}

TEST_P(SegmentOpsTest, GatherCopiesRowsOfEveryType) {
  for (const tensor::DType dtype : kTypes) {
    for (const int64_t cols : {1, 8, 33, 100}) {
      const std::vector<int32_t> index = RandomEdges(&rng_, 1, 11, 90).dst;
      const Segments segments = *GroupByIndex(Indices::Of(index.data(), 90), 11);
      const TestFeatures src = TestFeatures::Random(&rng_, dtype, 11, cols, 3);
      TestFeatures got(dtype, 90, cols, 5);
      ASSERT_TRUE(Gather(ctx_, segments, src.view(), got.out()).ok());
      for (int64_t e = 0; e < 90; ++e) {
        for (int64_t c = 0; c < cols; ++c) ASSERT_EQ(got.at(e, c), src.at(index[e], c)) << e << " " << c;
      }
    }
  }
}

TEST_P(SegmentOpsTest, SoftmaxOfMaskedElementsIsZero) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<int32_t> index = {0, 0, 1, 1, 2, 2, 3, 3};
  const Segments segments = *GroupByIndex(Indices::Of(index.data(), 8), 4);
  for (const tensor::DType dtype : kTypes) {
    for (const int64_t cols : {1, 20}) {
      TestFeatures x(dtype, 8, cols), y(dtype, 8, cols);
      for (const int row : {0, 1, 3}) {  // all of segment 0, one of segment 1
        for (int64_t c = 0; c < cols; ++c) x.Set(row, c, -kInfinity);
      }
      for (int64_t c = 0; c < cols; ++c) {
        x.Set(4, c, kNan);
        x.Set(6, c, -3e38F);
        x.Set(7, c, -3e38F);
      }
      if (dtype == tensor::DType::kF16) {
        x.Set(6, 0, -65504);
        x.Set(7, 0, -65504);
      }
      ASSERT_TRUE(SegmentSoftmax(ctx_, segments, x.view(), y.out()).ok());
      EXPECT_EQ(y.at(0, 0), 0);
      EXPECT_EQ(y.at(1, cols - 1), 0);
      EXPECT_EQ(y.at(2, cols - 1), 1);
      EXPECT_EQ(y.at(3, cols - 1), 0);
      EXPECT_TRUE(std::isnan(y.at(4, 0)) && std::isnan(y.at(5, cols - 1)));
      EXPECT_EQ(y.at(6, 0), 0.5F);  // the most negative numbers are no masks
    }
  }
}

TEST_P(SegmentOpsTest, SoftmaxMatchesDouble) {
  for (const int64_t cols : {1, 4, 8, 19}) {
    const std::vector<int32_t> index = RandomEdges(&rng_, 1, 17, 150).dst;
    const Segments segments = *GroupByIndex(Indices::Of(index.data(), 150), 17);
    const TestFeatures x = TestFeatures::Random(&rng_, tensor::DType::kF32, 150, cols);
    const TestFeatures grad = TestFeatures::Random(&rng_, tensor::DType::kF32, 150, cols);
    TestFeatures y(tensor::DType::kF32, 150, cols), got(tensor::DType::kF32, 150, cols);
    ASSERT_TRUE(SegmentSoftmax(ctx_, segments, x.view(), y.out()).ok());
    ASSERT_TRUE(SegmentSoftmaxBackward(ctx_, segments, y.view(), grad.view(), got.out()).ok());
    for (int64_t c = 0; c < cols; ++c) {
      for (int32_t s = 0; s < 17; ++s) {
        double sum = 0, dot = 0;
        for (int e = 0; e < 150; ++e) sum += index[e] == s ? std::exp(double{x.at(e, c)}) : 0;
        for (int e = 0; e < 150; ++e)
          dot += index[e] == s ? std::exp(double{x.at(e, c)}) / sum * grad.at(e, c) : 0;
        for (int e = 0; e < 150; ++e) {
          if (index[e] != s) continue;
          const double want = std::exp(double{x.at(e, c)}) / sum;
          ASSERT_NEAR(y.at(e, c), want, 1e-6);
          ASSERT_NEAR(got.at(e, c), want * (grad.at(e, c) - dot), 2e-6);
        }
      }
    }
  }
}

// The softmax is f32 and rounded once; its gradient is that of the rounded values, and is rounded once.
TEST_P(SegmentOpsTest, SoftmaxOfEveryTypeMatchesDouble) {
  for (const tensor::DType dtype : kTypes) {
    for (const int64_t cols : {1, 4, 8, 19}) {
      const std::vector<int32_t> index = RandomEdges(&rng_, 1, 17, 150).dst;
      const Segments segments = *GroupByIndex(Indices::Of(index.data(), 150), 17);
      const TestFeatures x = TestFeatures::Random(&rng_, dtype, 150, cols, 2);
      const TestFeatures grad = TestFeatures::Random(&rng_, dtype, 150, cols);
      TestFeatures y(dtype, 150, cols), got(dtype, 150, cols, 3);
      ASSERT_TRUE(SegmentSoftmax(ctx_, segments, x.view(), y.out()).ok());
      ASSERT_TRUE(SegmentSoftmaxBackward(ctx_, segments, y.view(), grad.view(), got.out()).ok());
      for (int64_t c = 0; c < cols; ++c) {
        std::vector<double> sum(17, 0), dot(17, 0);
        for (int e = 0; e < 150; ++e) {
          sum[index[e]] += std::exp(double{x.at(e, c)});
          dot[index[e]] += double{y.at(e, c)} * grad.at(e, c);
        }
        for (int e = 0; e < 150; ++e) {
          const double want = std::exp(double{x.at(e, c)}) / sum[index[e]],
                       want_grad = y.at(e, c) * (grad.at(e, c) - dot[index[e]]);
          ASSERT_NEAR(y.at(e, c), want, 1e-6 + Unit(dtype) * want);
          ASSERT_NEAR(got.at(e, c), want_grad, 2e-6 + Unit(dtype) * std::abs(want_grad));
        }
      }
    }
  }
}

TEST_P(SegmentOpsTest, WrongShapesAreNamed) {
  TestFeatures src(tensor::DType::kF32, 3, 2), out(tensor::DType::kF32, 4, 2),
      half(tensor::DType::kF16, 4, 2);
  const std::vector<int32_t> index = {0, 1, 9};
  auto fault = [&](const Output& to, int64_t edges, Reduce reduce, const ReduceOptions& options) {
    return moesaic::Message(Scatter(ctx_, reduce, src.view(), Indices::Of(index.data(), edges), to, options));
  };
  EXPECT_EQ(fault(out.out(), 2, Reduce::kSum, {}),
            "index must have one element per row of src, 3, but has 2");
  EXPECT_EQ(fault(out.out(), 3, Reduce::kSum, {}), "index[2] must be in [0, 4), but is 9");
  const std::vector<int32_t> good = {0, 1, 2};
  const Segments segments = *GroupByIndex(Indices::Of(good.data(), 3), 4);
  EXPECT_EQ(moesaic::Message(Segment(ctx_, Reduce::kSum, segments, src.view(), half.out())),
            "src and out must have one type, but are F32 and F16");
  EXPECT_EQ(moesaic::Message(Segment(ctx_, Reduce::kMax, segments, src.view(), out.out(), {.beta = 1})),
            "max and min need alpha 1 and beta 0, not 1 and 1");
  EXPECT_EQ(moesaic::Message(Segment(ctx_, Reduce::kSum, segments, out.view(), out.out())),
            "src must have 3 rows, but has 4");
}

}  // namespace
}  // namespace moesaic::graph
