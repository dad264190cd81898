// The fused edge perceptron against plain loops in double, with weights of every format.
#include "science/edge_mlp.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <span>

#include "science/test_graphs.h"

namespace moesaic::science {
namespace {

constexpr int kNodes = 30, kInputs = 9, kEdgeInputs = 4, kHidden = 24, kOutputs = 17;
constexpr int kFirst = 2 * kInputs + 1 + kEdgeInputs;

struct MlpCase {
  std::vector<float> h, xyz, edge, w1, b1, w2, b2;
  graph::TestEdges edges;
};

MlpCase RandomCase(int64_t num_edges) {
  std::mt19937 rng(8);
  std::uniform_real_distribution<float> uniform(-1, 1);
  MlpCase c;
  auto fill = [&](std::vector<float>* values, int64_t count) {
    for (int64_t i = 0; i < count; ++i) values->push_back(uniform(rng));
  };
  c.edges = graph::RandomEdges(&rng, kNodes, kNodes, num_edges);
  fill(&c.h, kNodes * kInputs);
  fill(&c.xyz, kNodes * 3);
  fill(&c.edge, num_edges * kEdgeInputs);
  fill(&c.w1, kHidden * kFirst);
  fill(&c.b1, kHidden);
  fill(&c.w2, kOutputs * kHidden);
  fill(&c.b2, kOutputs);
  return c;
}

EdgeMlp MakeMlp(const MlpCase& c, tensor::PackedFormat format) {
  EdgeMlp mlp;
  EXPECT_TRUE(mlp.SplitFirst(kHidden, kInputs, kInputs, true, kEdgeInputs, c.w1, c.b1, format).ok());
  mlp.rest.push_back(*Dense::Pack(kOutputs, kHidden, c.w2, c.b2, format));
  return mlp;
}

EdgeMlpInputs InputsOf(const MlpCase& c) {
  return {.dst = c.h.data(),
          .src = c.h.data(),
          .edge = c.edge.data(),
          .dst_xyz = c.xyz.data(),
          .src_xyz = c.xyz.data()};
}

double SiluOf(double x) { return x / (1 + std::exp(-x)); }

// Variance of the error of a product x . w whose factors are rounded. An error is evenly spread over a step:
// of bf16 2^-8 to 2^-7 of the value x, so that its variance is (2^-8 x)^2 / 6 on average; of int8 1/127 of
// the largest element, so that its variance is a twelfth of the square of that.
double RoundingVariance(std::span<const double> x, std::span<const float> w, tensor::PackedFormat format) {
  double x_largest = 0, w_largest = 0, variance = 0;
  for (size_t k = 0; k < x.size(); ++k) {
    x_largest = std::max(x_largest, std::abs(x[k]));
    w_largest = std::max(w_largest, std::abs(double{w[k]}));
  }
  auto of = [&](double value, double largest) {
    if (format == tensor::PackedFormat::kF32) return 0.0;
    return format == tensor::PackedFormat::kBF16 ? std::pow(0x1p-8 * value, 2) / 6
                                                 : std::pow(largest / 127, 2) / 12;
  };
  for (size_t k = 0; k < x.size(); ++k)
    variance += of(x[k], x_largest) * std::pow(w[k], 2) + std::pow(x[k], 2) * of(w[k], w_largest);
  return variance;
}

struct PlainResult {
  std::vector<double> out;
  std::vector<double> deviation;  // standard deviation of the error of rounded weights and inputs
};

// The perceptron on edge e, on the concatenation of its inputs.
PlainResult PlainMlp(const MlpCase& c, int64_t e, tensor::PackedFormat format = tensor::PackedFormat::kF32) {
  constexpr double kSlope = 1.1;  // of SiLU, at most
  std::vector<double> x;
  const int64_t d = c.edges.dst[e], s = c.edges.src[e];
  x.insert(x.end(), c.h.begin() + d * kInputs, c.h.begin() + (d + 1) * kInputs);
  x.insert(x.end(), c.h.begin() + s * kInputs, c.h.begin() + (s + 1) * kInputs);
  double squared = 0;
  for (int axis = 0; axis < 3; ++axis)
    squared += std::pow(double{c.xyz[3 * d + axis]} - c.xyz[3 * s + axis], 2);
  x.push_back(squared);
  x.insert(x.end(), c.edge.begin() + e * kEdgeInputs, c.edge.begin() + (e + 1) * kEdgeInputs);
  std::vector<double> hidden(kHidden), variance(kHidden, 0);
  PlainResult result{.out = std::vector<double>(kOutputs), .deviation = std::vector<double>(kOutputs)};
  for (int i = 0; i < kHidden; ++i) {
    const std::span<const float> row(c.w1.data() + i * kFirst, kFirst);
    hidden[i] = c.b1[i];
    for (int j = 0; j < kFirst; ++j) hidden[i] += row[j] * x[j];
    hidden[i] = SiluOf(hidden[i]);
    // Inputs of the destination, the source and the edge have scales of their own; the distance is f32.
    for (const auto& [first, count] :
         {std::pair{0, kInputs}, {kInputs, kInputs}, {2 * kInputs + 1, kEdgeInputs}})
      variance[i] += RoundingVariance(std::span(x).subspan(first, count), row.subspan(first, count), format);
    variance[i] *= kSlope * kSlope;
  }
  for (int i = 0; i < kOutputs; ++i) {
    const std::span<const float> row(c.w2.data() + i * kHidden, kHidden);
    double sum = RoundingVariance(hidden, row, format);
    result.out[i] = c.b2[i];
    for (int j = 0; j < kHidden; ++j) {
      result.out[i] += row[j] * hidden[j];
      sum += std::pow(row[j], 2) * variance[j];
    }
    result.out[i] = SiluOf(result.out[i]);
    result.deviation[i] = kSlope * std::sqrt(sum);
  }
  return result;
}

class EdgeMlpTest : public testing::TestWithParam<runtime::Isa> {
 protected:
  std::unique_ptr<graph::Workspace> workspace_ = graph::MakeWorkspace(GetParam(), 2);
};
INSTANTIATE_TEST_SUITE_P(Isa, EdgeMlpTest, testing::ValuesIn(graph::GraphIsas()),
                         [](const auto& info) { return runtime::IsaName(info.param); });

TEST_P(EdgeMlpTest, MatchesDoubleWithEveryFormat) {
  const MlpCase c = RandomCase(700);
  const graph::Graph graph = c.edges.Build();
  for (const tensor::PackedFormat format :
       {tensor::PackedFormat::kF32, tensor::PackedFormat::kBF16, tensor::PackedFormat::kI8}) {
    std::vector<float> got(700 * kOutputs);
    ASSERT_TRUE(EdgeMlpMap(workspace_->context(), graph, MakeMlp(c, format), InputsOf(c), got.data()).ok());
    for (int64_t e = 0; e < 700; ++e) {
      const PlainResult want = PlainMlp(c, e, format);
      // Values reach 10, and sums in f32 have 50 terms. Sums of independent roundings are about normal: of
      // 11,900 results, none exceeds five standard deviations.
      for (int i = 0; i < kOutputs; ++i)
        ASSERT_NEAR(got[e * kOutputs + i], want.out[i], 2e-5 + 5 * want.deviation[i])
            << tensor::PackedFormatName(format) << " edge " << e;
    }
  }
}

TEST_P(EdgeMlpTest, ReducesAtDestinationsForAnyNumberOfThreads) {
  const MlpCase c = RandomCase(9000);  // 300 edges per node are several tiles
  const graph::Graph graph = c.edges.Build();
  const EdgeMlp mlp = MakeMlp(c, tensor::PackedFormat::kF32);
  std::vector<double> want(kNodes * kOutputs, 0);
  std::vector<int> count(kNodes, 0);
  for (int64_t e = 0; e < 9000; ++e) {
    const std::vector<double> message = PlainMlp(c, e).out;
    ++count[c.edges.dst[e]];
    for (int i = 0; i < kOutputs; ++i) want[c.edges.dst[e] * kOutputs + i] += message[i];
  }
  std::vector<float> sums(kNodes * kOutputs), means(kNodes * kOutputs), other(kNodes * kOutputs);
  ASSERT_TRUE(
      EdgeMlpReduce(workspace_->context(), graph, mlp, InputsOf(c), graph::Reduce::kSum, 0.5F, sums.data())
          .ok());
  ASSERT_TRUE(
      EdgeMlpReduce(workspace_->context(), graph, mlp, InputsOf(c), graph::Reduce::kMean, 1, means.data())
          .ok());
  for (int d = 0; d < kNodes; ++d) {
    for (int i = 0; i < kOutputs; ++i) {
      const double sum = want[d * kOutputs + i];
      ASSERT_NEAR(sums[d * kOutputs + i], sum / 2, 1e-2) << d;  // 300 terms of magnitude 10, added in f32
      ASSERT_NEAR(means[d * kOutputs + i], sum / std::max(1, count[d]), 1e-4) << d;
    }
  }
  const auto workspace = graph::MakeWorkspace(GetParam(), 3);
  ASSERT_TRUE(
      EdgeMlpReduce(workspace->context(), graph, mlp, InputsOf(c), graph::Reduce::kSum, 0.5F, other.data())
          .ok());
  EXPECT_EQ(other, sums);
}

TEST_P(EdgeMlpTest, WrongInputIsNamed) {
  const MlpCase c = RandomCase(10);
  const graph::Graph graph = c.edges.Build();
  const EdgeMlp mlp = MakeMlp(c, tensor::PackedFormat::kF32);
  std::vector<float> out(kNodes * kOutputs);
  auto fault = [&](const EdgeMlp& m, const EdgeMlpInputs& inputs, graph::Reduce reduce) {
    return moesaic::Message(EdgeMlpReduce(workspace_->context(), graph, m, inputs, reduce, 1, out.data()));
  };
  EdgeMlpInputs inputs = InputsOf(c);
  EXPECT_EQ(fault(mlp, inputs, graph::Reduce::kMax), "edge perceptrons are reduced by sum or mean");
  EXPECT_EQ(fault({}, inputs, graph::Reduce::kSum), "the perceptron has no first layer");
  inputs.edge = nullptr;
  EXPECT_EQ(fault(mlp, inputs, graph::Reduce::kSum), "edge features are missing");
  inputs = InputsOf(c);
  inputs.dst_xyz = nullptr;
  EXPECT_EQ(fault(mlp, inputs, graph::Reduce::kSum), "coordinates are missing");
}

}  // namespace
}  // namespace moesaic::science
