// EGNN, Evoformer layers and invariant point attention against PyTorch transcriptions, on every instruction
// set.
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <tuple>

#include "science/egnn.h"
#include "science/evoformer.h"
#include "science/invariant_points.h"
#include "science/test_goldens.h"

namespace moesaic::science {
namespace {

constexpr float kTolerance = 1e-5F;  // relative to the largest element
constexpr float kEquivariance = 1e-4F;

TEST(GoldensTest, ANumberThatIsNotFiniteFails) {
  EXPECT_FATAL_FAILURE(ExpectClose({std::numeric_limits<float>::quiet_NaN(), 1}, {2, 1}, kTolerance, "x"),
                       "x[0] is nan, not 2");
  EXPECT_FATAL_FAILURE(
      ExpectClose({1, std::numeric_limits<float>::infinity(), 1}, {1, 2, 1}, kTolerance, "x"),
      "x[1] is inf, not 2");
  EXPECT_NONFATAL_FAILURE(ExpectClose({1, 2, 1}, {1, 3, 1}, kTolerance, "x"), "x[1] is 2, not 3");
}

class LayersTest : public testing::TestWithParam<runtime::Isa> {
 protected:
  std::unique_ptr<graph::Workspace> workspace_ = graph::MakeWorkspace(GetParam(), 2);
  graph::Context ctx_ = workspace_->context();
  std::mt19937 rng_{3};
};
INSTANTIATE_TEST_SUITE_P(Isa, LayersTest, testing::ValuesIn(graph::GraphIsas()),
                         [](const auto& info) { return runtime::IsaName(info.param); });

struct EgnnCase {
  EgnnLayer layer;
  graph::Graph graph;
  std::vector<float> h, x, edge;
};

EgnnCase LoadEgnn(const Goldens& goldens, const std::string& name, const EgnnOptions& options,
                  tensor::PackedFormat format = tensor::PackedFormat::kF32) {
  const WeightMap weights = goldens.Weights(name + ".weights.");
  const std::vector<int32_t> src = goldens.Ints(name + ".src"), dst = goldens.Ints(name + ".dst");
  const auto edges = static_cast<int64_t>(src.size());
  EgnnCase c{.layer = *EgnnLayer::Load(WeightScope(weights, "", format), 10, 3, options),
             .graph = *graph::Graph::FromCoo(graph::Indices::Of(src.data(), edges),
                                             graph::Indices::Of(dst.data(), edges), 20, 20),
             .h = goldens.Floats(name + ".h"),
             .x = goldens.Floats(name + ".x"),
             .edge = goldens.Floats(name + ".edge")};
  return c;
}

const std::pair<const char*, EgnnOptions> kEgnnCases[] = {
    {"plain", {}}, {"gated", {.residual = true, .mean_coordinates = false, .normalize = true, .tanh = true}}};

TEST_P(LayersTest, EgnnMatchesPyTorch) {
  const Goldens goldens("egnn");
  for (const auto& [name, options] : kEgnnCases) {
    const EgnnCase c = LoadEgnn(goldens, name, options);
    std::vector<float> h(c.h.size()), x(c.x.size());
    ASSERT_TRUE(c.layer.Run(ctx_, c.graph, c.h.data(), c.x.data(), c.edge.data(), h.data(), x.data()).ok());
    ExpectClose(h, goldens.Floats(std::string(name) + ".h_out"), kTolerance, "h");
    ExpectClose(x, goldens.Floats(std::string(name) + ".x_out"), kTolerance, "x");
  }
}

// A rounding to bf16 has an error of 2^-8 / sqrt(6) of a value, one to int8 of 1/440 of the largest element
// of its row, or 1/255 of a typical one, as standard deviations. A product has two, and four linear layers
// follow one another: sqrt(8) times as much is 0.45% and 1.1% of a typical value. The bounds are relative to
// the largest value, 2.7 to 3.6 times the root mean square: 3.0 to 4.0 and 2.7 to 3.6 standard deviations.
// The inputs h and x, which the layer adds to its results, are not rounded: errors are smaller than that.
TEST_P(LayersTest, EgnnRoundsWeights) {
  const Goldens goldens("egnn");
  for (const auto& [format, bound] :
       {std::pair{tensor::PackedFormat::kBF16, 0.005}, {tensor::PackedFormat::kI8, 0.011}}) {
    for (const auto& [name, options] : kEgnnCases) {
      const EgnnCase c = LoadEgnn(goldens, name, options, format);
      std::vector<float> h(c.h.size()), x(c.x.size());
      ASSERT_TRUE(c.layer.Run(ctx_, c.graph, c.h.data(), c.x.data(), c.edge.data(), h.data(), x.data()).ok());
      const std::vector<float> exact = goldens.Floats(std::string(name) + ".h_out");
      ExpectClose(h, exact, bound, "h");
      ExpectClose(x, goldens.Floats(std::string(name) + ".x_out"), bound, "x");
      float largest = 0;
      for (size_t i = 0; i < h.size(); ++i) largest = std::max(largest, std::abs(h[i] - exact[i]));
      EXPECT_GT(largest, 10 * kTolerance);
    }
  }
}

TEST_P(LayersTest, EgnnReadsAMissingBiasAsZero) {
  const Goldens goldens("egnn");
  const auto& [name, options] = kEgnnCases[1];
  const EgnnCase c = LoadEgnn(goldens, name, options);
  std::vector<float> h[2], x[2];
  for (const bool missing : {false, true}) {
    WeightMap weights = goldens.Weights(std::string(name) + ".weights.");
    for (const std::string bias : {"att_mlp.0.bias", "coord_mlp.2.bias"}) {
      weights[bias] = {.shape = {1}, .values = {0}};
      if (missing) weights.erase(bias);
    }
    const EgnnLayer layer = *EgnnLayer::Load(WeightScope(weights), 10, 3, options);
    h[missing].resize(c.h.size());
    x[missing].resize(c.x.size());
    ASSERT_TRUE(
        layer.Run(ctx_, c.graph, c.h.data(), c.x.data(), c.edge.data(), h[missing].data(), x[missing].data())
            .ok());
  }
  EXPECT_EQ(h[0], h[1]);
  EXPECT_EQ(x[0], x[1]);
}

TEST_P(LayersTest, EgnnIsEquivariantAndIndependentOfThreads) {
  const Goldens goldens("egnn");
  for (const auto& [name, options] : kEgnnCases) {
    const EgnnCase c = LoadEgnn(goldens, name, options);
    std::vector<float> h(c.h.size()), x(c.x.size()), h_moved(c.h.size()), x_moved(c.x.size());
    ASSERT_TRUE(c.layer.Run(ctx_, c.graph, c.h.data(), c.x.data(), c.edge.data(), h.data(), x.data()).ok());
    const std::array<float, 9> rotation = RandomRotation(&rng_);
    const std::array<float, 3> shift = {3, -1, 2};
    const std::vector<float> moved = Moved(c.x, rotation, shift);
    ASSERT_TRUE(
        c.layer.Run(ctx_, c.graph, c.h.data(), moved.data(), c.edge.data(), h_moved.data(), x_moved.data())
            .ok());
    ExpectClose(h_moved, h, kEquivariance, "h");
    ExpectClose(x_moved, Moved(x, rotation, shift), kEquivariance, "x");
    const auto other = graph::MakeWorkspace(GetParam(), 5);
    std::vector<float> h_other(h.size()), x_other(x.size());
    ASSERT_TRUE(c.layer
                    .Run(other->context(), c.graph, c.h.data(), c.x.data(), c.edge.data(), h_other.data(),
                         x_other.data())
                    .ok());
    EXPECT_EQ(h_other, h);
    EXPECT_EQ(x_other, x);
  }
}

// Weights of an EgnnModel with `inputs` inputs and layers of `outputs` outputs. Layers of the authors' QM9
// model have a gate and no coordinate perceptron.
WeightMap PropertyWeights(std::mt19937* rng, int64_t inputs, int64_t hidden, int64_t outputs,
                          bool qm9 = false) {
  WeightMap weights;
  std::uniform_real_distribution<float> uniform(-0.5F, 0.5F);
  auto linear = [&](const std::string& name, int64_t n, int64_t k) {
    for (const auto& [suffix, shape] :
         {std::pair{".weight", std::vector<int64_t>{n, k}}, {".bias", std::vector<int64_t>{n}}}) {
      WeightTensor& tensor = weights[name + suffix];
      tensor.shape = shape;
      for (int64_t i = 0; i < n * (shape.size() == 2 ? k : 1); ++i) tensor.values.push_back(uniform(*rng));
    }
  };
  linear("embedding", hidden, inputs);
  for (const std::string layer : {"gcl_0.", "gcl_1."}) {
    linear(layer + "edge_mlp.0", hidden, 2 * hidden + 1);
    linear(layer + "edge_mlp.2", hidden, hidden);
    linear(layer + "node_mlp.0", hidden, 2 * hidden);
    linear(layer + "node_mlp.2", outputs, hidden);
    if (qm9) {
      linear(layer + "att_mlp.0", 1, hidden);
      continue;
    }
    linear(layer + "coord_mlp.0", hidden, hidden);
    linear(layer + "coord_mlp.2", 1, hidden);
  }
  linear("node_dec.0", hidden, hidden);
  linear("node_dec.2", hidden, hidden);
  linear("graph_dec.0", hidden, hidden);
  linear("graph_dec.2", 1, hidden);
  return weights;
}

TEST_P(LayersTest, EgnnModelNeedsLayersOfOneWidth) {
  EXPECT_TRUE(EgnnModel::Load(PropertyWeights(&rng_, 5, 8, 8)).ok());
  for (const int64_t outputs : {4, 200}) {
    EXPECT_EQ(moesaic::Message(EgnnModel::Load(PropertyWeights(&rng_, 5, 8, outputs)).status()),
              fmt::format("tensor \"gcl_0.node_mlp.2.weight\" must have the shape [8, -1], but has [{}, 8]",
                          outputs));
  }
}

// A model of two layers, transcribed from the layer that EgnnMatchesPyTorch covers, in double.
struct PlainEgnnModel {
  const WeightMap& weights;

  std::vector<double> Linear(const std::string& name, const std::vector<double>& x) const {
    const WeightTensor &w = weights.at(name + ".weight"), &b = weights.at(name + ".bias");
    const size_t n = w.shape[0], k = w.shape[1];
    EXPECT_EQ(x.size(), k);
    std::vector<double> y(n);
    for (size_t i = 0; i < n; ++i) {
      y[i] = b.values[i];
      for (size_t j = 0; j < k; ++j) y[i] += double{w.values[i * k + j]} * x[j];
    }
    return y;
  }
  static std::vector<double> Silu(std::vector<double> x) {
    for (double& value : x) value /= 1 + std::exp(-value);
    return x;
  }
  static std::vector<double> Joined(std::vector<double> a, const std::vector<double>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  }
  std::vector<double> Perceptron(const std::string& name, const std::vector<double>& x) const {
    return Linear(name + ".2", Silu(Linear(name + ".0", x)));
  }

  double Predict(const graph::TestEdges& edges, const std::vector<float>& features,
                 std::vector<double> x) const {
    const size_t nodes = edges.num_dst, inputs = features.size() / nodes;
    std::vector<std::vector<double>> h;
    for (size_t i = 0; i < nodes; ++i)
      h.push_back(Linear("embedding", {features.begin() + i * inputs, features.begin() + (i + 1) * inputs}));
    for (const std::string layer : {"gcl_0.", "gcl_1."}) {
      std::vector<std::vector<double>> sums(nodes, std::vector<double>(h[0].size()));
      std::vector<double> shifts(x.size()), count(nodes);
      for (int64_t e = 0; e < edges.size(); ++e) {
        const int32_t s = edges.src[e], d = edges.dst[e];
        double squared = 0;
        for (int axis = 0; axis < 3; ++axis) squared += std::pow(x[3 * d + axis] - x[3 * s + axis], 2);
        std::vector<double> m = Silu(Perceptron(layer + "edge_mlp", Joined(Joined(h[d], h[s]), {squared})));
        if (weights.contains(layer + "att_mlp.0.weight")) {
          const double gate = 1 / (1 + std::exp(-Linear(layer + "att_mlp.0", m)[0]));
          for (double& value : m) value *= gate;
        }
        const bool moves = weights.contains(layer + "coord_mlp.0.weight");
        const double weight = moves ? Perceptron(layer + "coord_mlp", m)[0] : 0;
        for (size_t c = 0; c < m.size(); ++c) sums[d][c] += m[c];
        for (int axis = 0; axis < 3; ++axis)
          shifts[3 * d + axis] += weight * (x[3 * d + axis] - x[3 * s + axis]);
        ++count[d];
      }
      for (size_t i = 0; i < nodes; ++i) {
        const std::vector<double> update = Perceptron(layer + "node_mlp", Joined(h[i], sums[i]));
        for (size_t c = 0; c < update.size(); ++c) h[i][c] += update[c];
        for (int axis = 0; axis < 3; ++axis)
          x[3 * i + axis] += shifts[3 * i + axis] / std::max(1.0, count[i]);
      }
    }
    std::vector<double> total(h[0].size());
    for (const std::vector<double>& row : h) {
      const std::vector<double> decoded = Perceptron("node_dec", row);
      for (size_t c = 0; c < decoded.size(); ++c) total[c] += decoded[c];
    }
    return Perceptron("graph_dec", total)[0];
  }
};

// Edges between all pairs of different nodes.
graph::TestEdges CompleteEdges(int32_t nodes) {
  graph::TestEdges edges{.num_src = nodes, .num_dst = nodes, .src = {}, .dst = {}};
  for (int32_t d = 0; d < nodes; ++d) {
    for (int32_t s = 0; s < nodes; ++s) {
      if (s == d) continue;
      edges.src.push_back(s);
      edges.dst.push_back(d);
    }
  }
  return edges;
}

TEST_P(LayersTest, EgnnModelMatchesDouble) {
  for (const bool qm9 : {false, true}) {
    const int inputs = qm9 ? 15 : 5;
    const WeightMap weights = PropertyWeights(&rng_, inputs, 8, 8, qm9);
    const EgnnModel model = *EgnnModel::Load(weights);
    std::uniform_real_distribution<float> uniform(-1, 1);
    std::vector<float> features, xyz, expected;
    graph::TestEdges both{.num_src = 19, .num_dst = 19, .src = {}, .dst = {}};
    for (const auto& [first, nodes] : {std::pair{0, 8}, {8, 11}}) {  // two molecules
      const graph::TestEdges edges =
          qm9 ? CompleteEdges(nodes) : graph::RandomEdges(&rng_, nodes, nodes, 40, false, false);
      std::vector<float> own_features, own_xyz;
      for (int i = 0; i < inputs * nodes; ++i) own_features.push_back(uniform(rng_));
      for (int i = 0; i < 3 * nodes; ++i) own_xyz.push_back(uniform(rng_));
      expected.push_back(static_cast<float>(
          PlainEgnnModel{weights}.Predict(edges, own_features, {own_xyz.begin(), own_xyz.end()})));
      features.insert(features.end(), own_features.begin(), own_features.end());
      xyz.insert(xyz.end(), own_xyz.begin(), own_xyz.end());
      for (int64_t e = 0; e < edges.size(); ++e) {
        both.src.push_back(first + edges.src[e]);
        both.dst.push_back(first + edges.dst[e]);
      }
    }
    const int64_t bounds[] = {0, 8, 19};
    const graph::Segments molecules = *graph::SegmentsFromPtr(graph::Indices::Of(bounds, 3), 19);
    const graph::Graph graph = both.Build();
    const std::vector<float> got = *model.Predict(ctx_, graph, features.data(), xyz.data(), molecules);
    ExpectClose(got, expected, kTolerance, "property");
    const std::vector<float> moved = Moved(xyz, RandomRotation(&rng_), {3, -1, 2});
    ExpectClose(*model.Predict(ctx_, graph, features.data(), moved.data(), molecules), got, kEquivariance,
                "moved");
    const auto other = graph::MakeWorkspace(GetParam(), 3);
    EXPECT_EQ(*model.Predict(other->context(), graph, features.data(), xyz.data(), molecules), got);
    const int64_t short_bounds[] = {0, 8};
    EXPECT_EQ(moesaic::Message(model
                                   .Predict(ctx_, graph, features.data(), xyz.data(),
                                            *graph::SegmentsFromPtr(graph::Indices::Of(short_bounds, 2), 8))
                                   .status()),
              "molecules have 8 nodes, but the graph has 19");
  }
}

// A coordinate perceptron whose result is 0 moves nothing, as none does.
TEST_P(LayersTest, EgnnWithoutCoordinatePerceptronKeepsCoordinates) {
  const Goldens goldens("egnn");
  for (const auto& [name, options] : kEgnnCases) {
    const EgnnCase c = LoadEgnn(goldens, name, options);
    WeightMap weights = goldens.Weights(std::string(name) + ".weights.");
    std::vector<float> h[2], x[2];
    for (const bool missing : {false, true}) {
      for (float& value : weights.at("coord_mlp.2.weight").values) value = 0;
      if (missing) std::erase_if(weights, [](const auto& w) { return w.first.starts_with("coord_mlp."); });
      const EgnnLayer layer = *EgnnLayer::Load(WeightScope(weights), 10, 3, options);
      h[missing].resize(c.h.size());
      x[missing].resize(c.x.size());
      ASSERT_TRUE(
          layer
              .Run(ctx_, c.graph, c.h.data(), c.x.data(), c.edge.data(), h[missing].data(), x[missing].data())
              .ok());
    }
    EXPECT_EQ(x[0], c.x);
    EXPECT_EQ(x[1], c.x);
    // h does not depend on the coordinate perceptron: PyTorch's result is that of both.
    ExpectClose(h[0], goldens.Floats(std::string(name) + ".h_out"), kTolerance, "h");
    ExpectClose(h[1], goldens.Floats(std::string(name) + ".h_out"), kTolerance, "h");
  }
}

// Nodes 18 and 19 of the goldens have no incoming edge: their rows are those of a graph without edges.
TEST_P(LayersTest, EgnnRunsWithoutEdgesAndWithoutNodes) {
  const Goldens goldens("egnn");
  const graph::Graph isolated = *graph::Graph::FromCoo({}, {}, 2, 2);
  const graph::Graph empty = *graph::Graph::FromCoo({}, {}, 0, 0);
  auto last_two = [](const std::vector<float>& rows, int64_t width) {
    return std::vector<float>(rows.end() - 2 * width, rows.end());
  };
  for (const auto& [name, options] : kEgnnCases) {
    const EgnnCase c = LoadEgnn(goldens, name, options);
    const std::vector<float> h = last_two(c.h, 10), x = last_two(c.x, 3);
    std::vector<float> h_out(h.size()), x_out(x.size());
    ASSERT_TRUE(c.layer.Run(ctx_, isolated, h.data(), x.data(), nullptr, h_out.data(), x_out.data()).ok());
    ExpectClose(h_out, last_two(goldens.Floats(std::string(name) + ".h_out"), 10), kTolerance, "h");
    EXPECT_EQ(x_out, x);
    EXPECT_TRUE(c.layer.Run(ctx_, empty, nullptr, nullptr, nullptr, nullptr, nullptr).ok());
  }
  // A molecule without atoms has the value of a sum of 0.
  const WeightMap weights = PropertyWeights(&rng_, 5, 8, 8);
  const EgnnModel model = *EgnnModel::Load(weights);
  const int64_t bounds[] = {0, 0};
  const std::vector<float> got = *model.Predict(ctx_, empty, nullptr, nullptr,
                                                *graph::SegmentsFromPtr(graph::Indices::Of(bounds, 2), 0));
  const double want = PlainEgnnModel{weights}.Perceptron("graph_dec", std::vector<double>(8))[0];
  ExpectClose(got, {static_cast<float>(want)}, kTolerance, "property");
}

// Runs a layer on a copy of x and returns its update.
template <typename Run>
std::vector<float> UpdateOf(const std::vector<float>& x, const Run& run) {
  std::vector<float> updated = x;
  EXPECT_TRUE(run(updated.data()).ok());
  for (size_t i = 0; i < x.size(); ++i) updated[i] -= x[i];
  return updated;
}

TEST_P(LayersTest, EvoformerLayersMatchPyTorch) {
  const Goldens goldens("evoformer");
  const WeightMap weights = goldens.Weights("weights.");
  const WeightScope scope(weights);
  const std::vector<float> m = goldens.Floats("m"), z = goldens.Floats("z"),
                           msa_mask = goldens.Floats("msa_mask"), pair_mask = goldens.Floats("pair_mask");
  const int64_t sequences = goldens.Shape("m")[0], residues = goldens.Shape("m")[1];
  auto expect = [&](const std::string& name, const std::vector<float>& got) {
    ExpectClose(got, goldens.Floats(name + ".out"), kTolerance, name.c_str());
  };
  for (const bool incoming : {false, true}) {
    const std::string name = incoming ? "tri_mul_in" : "tri_mul_out";
    const auto layer = *TriangleMultiplication::Load(scope.Under(name), incoming);
    expect(name, UpdateOf(z, [&](float* x) { return layer.Run(ctx_, residues, pair_mask.data(), x); }));
  }
  for (const bool ending : {false, true}) {
    const std::string name = ending ? "tri_att_end" : "tri_att_start";
    const auto layer = *TriangleAttention::Load(scope.Under(name), 2, ending);
    expect(name, UpdateOf(z, [&](float* x) { return layer.Run(ctx_, residues, pair_mask.data(), x); }));
  }
  for (const std::string name : {"msa_att_row", "msa_att_col"}) {
    const auto layer = *MsaAttention::Load(scope.Under(name), 2);
    expect(name, UpdateOf(m, [&](float* x) {
             return layer.Run(ctx_, sequences, residues, msa_mask.data(), z.data(), x);
           }));
  }
  const auto outer = *OuterProductMean::Load(scope.Under("outer_product_mean"));
  expect("outer_product_mean", UpdateOf(z, [&](float* x) {
           return outer.Run(ctx_, sequences, residues, msa_mask.data(), m.data(), x);
         }));
  const auto transition = *Transition::Load(scope.Under("pair_transition"));
  expect("pair_transition",
         UpdateOf(z, [&](float* x) { return transition.Run(ctx_, residues * residues, x); }));
  const auto block = *EvoformerBlock::Load(scope, 2, 2);
  std::vector<float> m_out = m, z_out = z;
  ASSERT_TRUE(
      block.Run(ctx_, sequences, residues, msa_mask.data(), pair_mask.data(), m_out.data(), z_out.data())
          .ok());
  // Nine layers in a row, each with the error of one.
  ExpectClose(m_out, goldens.Floats("m_out"), 9 * kTolerance, "m");
  ExpectClose(z_out, goldens.Floats("z_out"), 9 * kTolerance, "z");
}

TEST_P(LayersTest, EvoformerBlockDoesNotDependOnThreads) {
  const Goldens goldens("evoformer");
  const WeightMap weights = goldens.Weights("weights.");
  const auto block = *EvoformerBlock::Load(WeightScope(weights), 2, 2);
  // More residues and sequences than the goldens have, so that every layer divides its work.
  constexpr int64_t kSequences = 19, kResidues = 70;
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> m(kSequences * kResidues * goldens.Shape("m")[2]),
      z(kResidues * kResidues * goldens.Shape("z")[2]);
  for (float& x : m) x = uniform(rng_);
  for (float& x : z) x = uniform(rng_);
  std::vector<float> first_m, first_z;
  for (const int threads : {1, 3}) {
    const auto workspace = graph::MakeWorkspace(GetParam(), threads);
    std::vector<float> m_out = m, z_out = z;
    ASSERT_TRUE(
        block.Run(workspace->context(), kSequences, kResidues, nullptr, nullptr, m_out.data(), z_out.data())
            .ok());
    if (threads == 1) {
      first_m = m_out;
      first_z = z_out;
    }
    EXPECT_EQ(m_out, first_m);
    EXPECT_EQ(z_out, first_z);
  }
}

// The block of one residue and one sequence gives the rows of the first ones before padding.
TEST_P(LayersTest, EvoformerBlockRunsOnOneResidueAndOnNone) {
  const Goldens goldens("evoformer");
  const WeightMap weights = goldens.Weights("weights.");
  const auto block = *EvoformerBlock::Load(WeightScope(weights), 2, 2);
  const std::vector<float> m = goldens.Floats("m"), z = goldens.Floats("z");
  const int64_t residues = goldens.Shape("m")[1], c_m = goldens.Shape("m")[2], c_z = goldens.Shape("z")[2];
  std::vector<float> padded_m = FirstTwo(m, residues, c_m), padded_z = FirstTwo(z, residues, c_z);
  std::vector<float> one_m(m.begin(), m.begin() + c_m), one_z(z.begin(), z.begin() + c_z);
  const float mask[] = {1, 0, 0, 0};
  ASSERT_TRUE(block.Run(ctx_, 2, 2, mask, mask, padded_m.data(), padded_z.data()).ok());
  ASSERT_TRUE(block.Run(ctx_, 1, 1, nullptr, nullptr, one_m.data(), one_z.data()).ok());
  padded_m.resize(c_m);
  padded_z.resize(c_z);
  // Each side has the error of nine layers.
  ExpectClose(one_m, padded_m, 18 * kTolerance, "m");
  ExpectClose(one_z, padded_z, 18 * kTolerance, "z");
  EXPECT_TRUE(block.Run(ctx_, 3, 0, nullptr, nullptr, nullptr, nullptr).ok());
  EXPECT_TRUE(block.Backward(ctx_, 3, 0, nullptr, nullptr, nullptr, nullptr, {}, {}).ok());
}

TEST_P(LayersTest, EvoformerLayersMustAgreeOnChannels) {
  const WeightMap weights = Goldens("evoformer").Weights("weights.");
  const int64_t c_m = Goldens("evoformer").Shape("m")[2], c_z = Goldens("evoformer").Shape("z")[2];
  ASSERT_NE(c_m, c_z);
  // The transition of m in the place of that of z, and the other way round.
  for (const auto& [to, from, name, other] :
       {std::tuple{"pair_transition.", "msa_transition.", "z", "tri_mul_out"},
        std::tuple{"msa_transition.", "pair_transition.", "m", "msa_att_row"}}) {
    WeightMap mixed = weights;
    for (const auto& [key, tensor] : weights) {
      if (key.starts_with(from)) mixed[to + key.substr(std::string(from).size())] = tensor;
    }
    const bool is_msa = *name == 'm';
    EXPECT_EQ(
        moesaic::Message(EvoformerBlock::Load(WeightScope(mixed), 2, 2).status()),
        fmt::format("{} has {} channels of {}, but {} has {}", std::string(to, std::string(to).size() - 1),
                    is_msa ? c_z : c_m, name, other, is_msa ? c_m : c_z));
  }
}

class IpaTest : public LayersTest {
 protected:
  std::vector<float> Run(const std::vector<float>& rotation, const std::vector<float>& translation) {
    const std::vector<float> s = goldens_.Floats("ipa.s"), z = goldens_.Floats("z"),
                             mask = goldens_.Floats("ipa.mask");
    const WeightMap weights = goldens_.Weights("ipa.weights.");
    const auto layer = *InvariantPointAttention::Load(
        WeightScope(weights), {.heads = 3, .dim = 5, .query_points = 4, .value_points = 6});
    std::vector<float> out(s.size());
    EXPECT_TRUE(layer
                    .Run(ctx_, static_cast<int64_t>(mask.size()), s.data(), z.data(),
                         {rotation.data(), translation.data()}, mask.data(), out.data())
                    .ok());
    return out;
  }
  // Rows of residues that are not padding: those of padding are undefined in the paper's program.
  std::vector<float> Kept(std::vector<float> out) const {
    out.resize(out.size() - 2 * 14);
    return out;
  }
  Goldens goldens_{"evoformer"};
};
INSTANTIATE_TEST_SUITE_P(Isa, IpaTest, testing::ValuesIn(graph::GraphIsas()),
                         [](const auto& info) { return runtime::IsaName(info.param); });

TEST_P(IpaTest, MatchesPyTorch) {
  const std::vector<float> out = Run(goldens_.Floats("ipa.rotation"), goldens_.Floats("ipa.translation"));
  // Positions of some 100 angstroms are rounded to 2^-18 of an angstrom before any arithmetic.
  ExpectClose(Kept(out), Kept(goldens_.Floats("ipa.out")), 2 * kTolerance, "ipa");
}

TEST_P(IpaTest, DoesNotDependOnThreads) {
  const std::vector<float> rotation = goldens_.Floats("ipa.rotation"),
                           translation = goldens_.Floats("ipa.translation");
  const std::vector<float> out = Run(rotation, translation);
  for (const int threads : {1, 3}) {
    workspace_ = graph::MakeWorkspace(GetParam(), threads);
    ctx_ = workspace_->context();
    EXPECT_EQ(Run(rotation, translation), out) << threads;
  }
}

TEST_P(IpaTest, IsInvariantUnderMotions) {
  const std::vector<float> rotation = goldens_.Floats("ipa.rotation"),
                           translation = goldens_.Floats("ipa.translation");
  const std::vector<float> out = Run(rotation, translation);
  const std::array<float, 9> motion = RandomRotation(&rng_);
  std::vector<float> turned(rotation.size());
  for (size_t i = 0; i < rotation.size(); i += 9) {
    for (int row = 0; row < 3; ++row) {
      for (int column = 0; column < 3; ++column) {
        for (int k = 0; k < 3; ++k)
          turned[i + 3 * row + column] += motion[3 * row + k] * rotation[i + 3 * k + column];
      }
    }
  }
  ExpectClose(Kept(Run(turned, Moved(translation, motion, {5, 6, -7}))), Kept(out), kEquivariance, "ipa");
}

// One residue attends to itself alone, as does the first of two of which the second is padding.
TEST_P(IpaTest, RunsOnOneResidueAndOnNone) {
  const std::vector<float> s = goldens_.Floats("ipa.s"), z = goldens_.Floats("z"),
                           rotation = goldens_.Floats("ipa.rotation"),
                           translation = goldens_.Floats("ipa.translation");
  const int64_t c_s = goldens_.Shape("ipa.s")[1], residues = goldens_.Shape("z")[1],
                c_z = goldens_.Shape("z")[2];
  const std::vector<float> pair = FirstTwo(z, residues, c_z);
  const WeightMap weights = goldens_.Weights("ipa.weights.");
  const auto layer = *InvariantPointAttention::Load(
      WeightScope(weights), {.heads = 3, .dim = 5, .query_points = 4, .value_points = 6});
  const Frames frames = {rotation.data(), translation.data()};
  const float mask[] = {1, 0};
  std::vector<float> one(c_s), padded(2 * c_s);
  ASSERT_TRUE(layer.Run(ctx_, 1, s.data(), z.data(), frames, nullptr, one.data()).ok());
  ASSERT_TRUE(layer.Run(ctx_, 2, s.data(), pair.data(), frames, mask, padded.data()).ok());
  padded.resize(c_s);
  ExpectClose(one, padded, 4 * kTolerance, "ipa");  // each side has an error of 2 kTolerance
  EXPECT_TRUE(layer.Run(ctx_, 0, nullptr, nullptr, frames, nullptr, nullptr).ok());
}

TEST_P(LayersTest, MissingWeightsAreNamed) {
  WeightMap weights = Goldens("egnn").Weights("plain.weights.");
  weights.erase("coord_mlp.2.weight");
  EXPECT_EQ(moesaic::Message(EgnnLayer::Load(WeightScope(weights), 10, 3).status()),
            "the weights have no tensor \"coord_mlp.2.weight\"");
  EXPECT_EQ(moesaic::Message(EgnnLayer::Load(WeightScope(weights), 9, 3).status()),
            "tensor \"edge_mlp.0.weight\" must have the shape [-1, 22], but has [24, 24]");
}

}  // namespace
}  // namespace moesaic::science
