// The fused edge perceptron against plain loops in double, with weights of every format.
#include "science/edge_mlp.h"

#include <gtest/gtest.h>

#include <cmath>

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

// The perceptron on edge e, on the concatenation of its inputs.
std::vector<double> PlainMlp(const MlpCase& c, int64_t e) {
  std::vector<double> x;
  const int64_t d = c.edges.dst[e], s = c.edges.src[e];
  x.insert(x.end(), c.h.begin() + d * kInputs, c.h.begin() + (d + 1) * kInputs);
  x.insert(x.end(), c.h.begin() + s * kInputs, c.h.begin() + (s + 1) * kInputs);
  double squared = 0;
  for (int axis = 0; axis < 3; ++axis)
    squared += std::pow(double{c.xyz[3 * d + axis]} - c.xyz[3 * s + axis], 2);
  x.push_back(squared);
  x.insert(x.end(), c.edge.begin() + e * kEdgeInputs, c.edge.begin() + (e + 1) * kEdgeInputs);
  std::vector<double> hidden(kHidden), out(kOutputs);
  for (int i = 0; i < kHidden; ++i) {
    hidden[i] = c.b1[i];
    for (int j = 0; j < kFirst; ++j) hidden[i] += c.w1[i * kFirst + j] * x[j];
    hidden[i] = SiluOf(hidden[i]);
  }
  for (int i = 0; i < kOutputs; ++i) {
    out[i] = c.b2[i];
    for (int j = 0; j < kHidden; ++j) out[i] += c.w2[i * kHidden + j] * hidden[j];
    out[i] = SiluOf(out[i]);
  }
  return out;
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
  // Values reach 10. bf16 rounds weights and activations to 2^-9, int8 to 1/254 of their largest: over two
  // layers of 23 and 24 inputs, errors add up to some 0.3 % and 1.5 % of the largest value.
  for (const auto& [format, bound] : {std::pair{tensor::PackedFormat::kF32, 2e-5},
                                      {tensor::PackedFormat::kBF16, 0.15},
                                      {tensor::PackedFormat::kI8, 0.6}}) {
    std::vector<float> got(700 * kOutputs);
    ASSERT_TRUE(EdgeMlpMap(workspace_->context(), graph, MakeMlp(c, format), InputsOf(c), got.data()).ok());
    for (int64_t e = 0; e < 700; ++e) {
      const std::vector<double> want = PlainMlp(c, e);
      for (int i = 0; i < kOutputs; ++i)
        ASSERT_NEAR(got[e * kOutputs + i], want[i], bound)
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
    const std::vector<double> message = PlainMlp(c, e);
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
