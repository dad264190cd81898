// Backward passes on sizes above their blocks of edges, rows and queries: against differences of the forward
// pass, and bitwise equal for one and three threads. gradients_test.cc has the exact comparison on small
// sizes.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "science/egnn.h"
#include "science/evoformer.h"
#include "science/invariant_points.h"
#include "science/protein/mpnn_layer.h"
#include "science/se3/se3_layers.h"
#include "science/test_goldens.h"

namespace moesaic::science {
namespace {

using NamedArrays = std::map<std::string, std::vector<float>>;

// A layer with the weights of a golden case on larger inputs.
struct TileCase {
  std::string name;
  NamedArrays inputs;  // those with gradients
  // Step of the finite differences. Each unit of a ReLU whose sign changes on a step is an error.
  float step = 0x1p-7F;
  double tolerance = 0.02;
  // Returns all results, one after the other.
  std::function<std::vector<float>(const graph::Context&, const WeightMap&, const NamedArrays&)> run;
  // Adds the gradients for those of all results.
  std::function<Status(const graph::Context&, const WeightMap&, const NamedArrays& inputs,
                       const std::vector<float>& seed, NamedArrays& grads, const GradientMap& parameters)>
      backward;
};

class GradientTilesTest : public testing::Test {
 protected:
  std::vector<float> Normal(int64_t size, float scale = 1) {
    std::vector<float> x(size);
    for (float& value : x) value = scale * normal_(rng_);
    return x;
  }

  // Edges without loops, of which `at_one` begin at node 0.
  graph::TestEdges Edges(int64_t nodes, int64_t count, int64_t at_one) {
    graph::TestEdges edges{.num_src = nodes, .num_dst = nodes, .src = {}, .dst = {}};
    for (int64_t e = 0; e < count; ++e) {
      const auto src = static_cast<int32_t>(e < at_one ? 0 : rng_() % nodes);
      edges.src.push_back(src);
      edges.dst.push_back(static_cast<int32_t>((src + 1 + rng_() % (nodes - 1)) % nodes));
    }
    return edges;
  }

  NamedArrays GradientsOf(const TileCase& c, const WeightMap& weights, const std::vector<float>& seed,
                          int threads) {
    const auto workspace = graph::MakeWorkspace(graph::GraphIsas().back(), threads);
    NamedArrays grads, parameters;
    GradientMap map;
    for (const auto& [key, values] : c.inputs) grads[key].resize(values.size());
    for (const auto& [key, tensor] : weights) parameters[key].resize(tensor.values.size());
    for (auto& [key, values] : parameters) map[key] = values;
    EXPECT_TRUE(c.backward(workspace->context(), weights, c.inputs, seed, grads, map).ok()) << c.name;
    grads.merge(parameters);
    return grads;
  }

  void Check(const TileCase& c) {
    const WeightMap weights = goldens_.Weights(c.name + ".weights.");
    const auto workspace = graph::MakeWorkspace(graph::GraphIsas().back(), 2);
    const std::vector<float> seed =
        Normal(static_cast<int64_t>(c.run(workspace->context(), weights, c.inputs).size()));
    const NamedArrays grads = GradientsOf(c, weights, seed, 1);
    EXPECT_EQ(grads, GradientsOf(c, weights, seed, 3)) << c.name;
    for (const auto& [key, grad] : grads) {
      const bool is_input = c.inputs.contains(key);
      const std::vector<float> direction = Normal(static_cast<int64_t>(grad.size()));
      // An error of a block changes the derivative by a part of `norm`. The difference of two points has an
      // error of third order, relative to `norm`, and that of the rounding of results.
      constexpr double kRounding = 1e-6;
      double difference = 0, derivative = 0, norm = 0;
      for (const float sign : {1.0F, -1.0F}) {
        NamedArrays inputs = c.inputs;
        WeightMap moved = weights;
        std::vector<float>& values = is_input ? inputs.at(key) : moved.at(key).values;
        for (size_t i = 0; i < values.size(); ++i) values[i] += sign * c.step * direction[i];
        const std::vector<float> results = c.run(workspace->context(), moved, inputs);
        for (size_t i = 0; i < results.size(); ++i)
          difference += sign * double{seed[i]} * results[i] / (2 * c.step);
      }
      for (size_t i = 0; i < grad.size(); ++i) {
        derivative += double{grad[i]} * direction[i];
        norm += double{grad[i]} * grad[i];
      }
      const double rounding = kRounding * std::sqrt(static_cast<double>(seed.size())) / c.step;
      EXPECT_NEAR(derivative, difference, c.tolerance * std::sqrt(norm) + rounding) << c.name << " " << key;
    }
  }

  Goldens goldens_{"gradients"};
  std::mt19937 rng_{11};
  std::normal_distribution<float> normal_;
};

TEST_F(GradientTilesTest, TriangleMultiplication) {
  constexpr int64_t kResidues = 92;  // 8464 rows: two blocks
  for (const bool incoming : {false, true}) {
    Check({.name = incoming ? "tri_mul_in" : "tri_mul_out",
           .inputs = {{"z", Normal(kResidues * kResidues * 10)}},
           .run =
               [=](const auto& ctx, const auto& weights, const auto& inputs) {
                 std::vector<float> z = inputs.at("z");
                 const auto layer = *TriangleMultiplication::Load(WeightScope(weights), incoming);
                 EXPECT_TRUE(layer.Run(ctx, kResidues, nullptr, z.data()).ok());
                 return z;
               },
           .backward =
               [=](const auto& ctx, const auto& weights, const auto& inputs, const auto& seed, auto& grads,
                   const auto& parameters) {
                 const auto layer = *TriangleMultiplication::Load(WeightScope(weights), incoming);
                 return layer.Backward(ctx, kResidues, nullptr, inputs.at("z").data(), seed.data(),
                                       grads.at("z").data(), parameters);
               }});
  }
}

TEST_F(GradientTilesTest, TriangleAttention) {
  constexpr int64_t kResidues = 98;  // three tiles of queries, two blocks of rows
  for (const bool ending : {false, true}) {
    Check({.name = ending ? "tri_att_end" : "tri_att_start",
           .inputs = {{"z", Normal(kResidues * kResidues * 10)}},
           .run =
               [=](const auto& ctx, const auto& weights, const auto& inputs) {
                 std::vector<float> z = inputs.at("z");
                 const auto layer = *TriangleAttention::Load(WeightScope(weights), 3, ending);
                 EXPECT_TRUE(layer.Run(ctx, kResidues, nullptr, z.data()).ok());
                 return z;
               },
           .backward =
               [=](const auto& ctx, const auto& weights, const auto& inputs, const auto& seed, auto& grads,
                   const auto& parameters) {
                 const auto layer = *TriangleAttention::Load(WeightScope(weights), 3, ending);
                 return layer.Backward(ctx, kResidues, nullptr, inputs.at("z").data(), seed.data(),
                                       grads.at("z").data(), parameters);
               }});
  }
}

TEST_F(GradientTilesTest, AttentionOfAlignments) {
  constexpr int64_t kSequences = 90, kResidues = 98;
  for (const bool row : {true, false}) {
    NamedArrays inputs = {{"m", Normal(kSequences * kResidues * 11)}};
    if (row) inputs["z"] = Normal(kResidues * kResidues * 10);
    Check({.name = row ? "msa_att_row" : "msa_att_col",
           .inputs = inputs,
           .run =
               [=](const auto& ctx, const auto& weights, const auto& inputs) {
                 std::vector<float> m = inputs.at("m");
                 const auto layer = *MsaAttention::Load(WeightScope(weights), 3);
                 EXPECT_TRUE(layer
                                 .Run(ctx, kSequences, kResidues, nullptr,
                                      row ? inputs.at("z").data() : nullptr, m.data())
                                 .ok());
                 return m;
               },
           .backward =
               [=](const auto& ctx, const auto& weights, const auto& inputs, const auto& seed, auto& grads,
                   const auto& parameters) {
                 const auto layer = *MsaAttention::Load(WeightScope(weights), 3);
                 return layer.Backward(ctx, kSequences, kResidues, nullptr,
                                       row ? inputs.at("z").data() : nullptr, inputs.at("m").data(),
                                       seed.data(), row ? grads.at("z").data() : nullptr,
                                       grads.at("m").data(), parameters);
               }});
  }
}

TEST_F(GradientTilesTest, OuterProductMean) {
  constexpr int64_t kSequences = 120, kResidues = 70;  // three tiles of residues, two blocks of rows
  Check({.name = "outer_product_mean",
         .inputs = {{"m", Normal(kSequences * kResidues * 11)}},
         .run =
             [=](const auto& ctx, const auto& weights, const auto& inputs) {
               const auto layer = *OuterProductMean::Load(WeightScope(weights));
               std::vector<float> z(kResidues * kResidues * layer.c_z());
               EXPECT_TRUE(
                   layer.Run(ctx, kSequences, kResidues, nullptr, inputs.at("m").data(), z.data()).ok());
               return z;
             },
         .backward =
             [=](const auto& ctx, const auto& weights, const auto& inputs, const auto& seed, auto& grads,
                 const auto& parameters) {
               const auto layer = *OuterProductMean::Load(WeightScope(weights));
               return layer.Backward(ctx, kSequences, kResidues, nullptr, inputs.at("m").data(), seed.data(),
                                     grads.at("m").data(), parameters);
             }});
}

TEST_F(GradientTilesTest, InvariantPointAttention) {
  constexpr int64_t kResidues = 92;
  const InvariantPointOptions options = {.heads = 3, .dim = 5, .query_points = 4, .value_points = 6};
  std::vector<float> rotation;
  for (int64_t i = 0; i < kResidues; ++i) {
    const std::array<float, 9> one = RandomRotation(&rng_);
    rotation.insert(rotation.end(), one.begin(), one.end());
  }
  Check({.name = "ipa",
         .inputs = {{"s", Normal(kResidues * 14)},
                    {"z", Normal(kResidues * kResidues * 10)},
                    {"rotation", rotation},
                    {"translation", Normal(kResidues * 3, 3)}},
         .run =
             [=](const auto& ctx, const auto& weights, const auto& inputs) {
               const auto layer = *InvariantPointAttention::Load(WeightScope(weights), options);
               std::vector<float> out(kResidues * layer.c_s());
               EXPECT_TRUE(layer
                               .Run(ctx, kResidues, inputs.at("s").data(), inputs.at("z").data(),
                                    {inputs.at("rotation").data(), inputs.at("translation").data()}, nullptr,
                                    out.data())
                               .ok());
               return out;
             },
         .backward =
             [=](const auto& ctx, const auto& weights, const auto& inputs, const auto& seed, auto& grads,
                 const auto& parameters) {
               const auto layer = *InvariantPointAttention::Load(WeightScope(weights), options);
               return layer.Backward(ctx, kResidues, inputs.at("s").data(), inputs.at("z").data(),
                                     {inputs.at("rotation").data(), inputs.at("translation").data()}, nullptr,
                                     seed.data(),
                                     {grads.at("s").data(), grads.at("z").data(), grads.at("rotation").data(),
                                      grads.at("translation").data()},
                                     parameters);
             }});
}

TEST_F(GradientTilesTest, Egnn) {
  constexpr int64_t kNodes = 210, kEdges = 5000;  // two blocks of edges
  const graph::Graph graph = Edges(kNodes, kEdges, 200).Build();
  const std::pair<std::string, EgnnOptions> cases[] = {
      {"egnn.plain", {}},
      {"egnn.gated", {.residual = true, .mean_coordinates = false, .normalize = true, .tanh = true}}};
  for (const auto& [name, options] : cases) {
    Check({.name = name,
           .inputs = {{"h", Normal(kNodes * 6)}, {"x", Normal(kNodes * 3)}, {"edge", Normal(kEdges * 3)}},
           .run =
               [graph, options = options](const auto& ctx, const auto& weights, const auto& inputs) {
                 const auto layer = *EgnnLayer::Load(WeightScope(weights), 6, 3, options);
                 const int64_t h_size = kNodes * layer.outputs();
                 std::vector<float> out(h_size + kNodes * 3);
                 EXPECT_TRUE(layer
                                 .Run(ctx, graph, inputs.at("h").data(), inputs.at("x").data(),
                                      inputs.at("edge").data(), out.data(), out.data() + h_size)
                                 .ok());
                 return out;
               },
           .backward =
               [graph, options = options](const auto& ctx, const auto& weights, const auto& inputs,
                                          const auto& seed, auto& grads, const auto& parameters) {
                 const auto layer = *EgnnLayer::Load(WeightScope(weights), 6, 3, options);
                 return layer.Backward(
                     ctx, graph, inputs.at("h").data(), inputs.at("x").data(), inputs.at("edge").data(),
                     seed.data(), seed.data() + kNodes * layer.outputs(),
                     {grads.at("h").data(), grads.at("x").data(), grads.at("edge").data()}, parameters);
               }});
  }
}

TEST_F(GradientTilesTest, EquivariantAttention) {
  constexpr int64_t kNodes = 40, kEdges = 700;  // 200 edges of one source are in several tiles
  const graph::Graph graph = Edges(kNodes, kEdges, 200).Build();
  const Fiber in = {{0, 2}, {1, 3}}, out = {{0, 4}, {1, 4}, {2, 4}};
  const auto load = [=](const WeightMap& weights) {
    return *Se3AttentionBlock::Load(WeightScope(weights), in, out, 3, 2, 2);
  };
  const auto nodes = [](const NamedArrays& inputs) {
    return FiberFeatures{{0, inputs.at("x0")}, {1, inputs.at("x1")}};
  };
  Check({.name = "se3",
         .inputs = {{"x0", Normal(kNodes * 2)},
                    {"x1", Normal(kNodes * 9)},
                    {"edge", Normal(kEdges * 3)},
                    {"xyz", Normal(kNodes * 3, 2)}},
         .step = 0x1p-12F,
         .tolerance = 0.05,
         .run =
             [=](const auto& ctx, const auto& weights, const auto& inputs) {
               const Se3Graph edges = *Se3Graph::Create(graph, inputs.at("xyz").data(), 2);
               const FiberFeatures found =
                   *load(weights).Run(ctx, edges, nodes(inputs), inputs.at("edge").data());
               std::vector<float> all;
               for (const auto& [degree, values] : found) all.insert(all.end(), values.begin(), values.end());
               return all;
             },
         .backward =
             [=](const auto& ctx, const auto& weights, const auto& inputs, const auto& seed, auto& grads,
                 const auto& parameters) {
               const Se3Graph edges = *Se3Graph::Create(graph, inputs.at("xyz").data(), 2);
               FiberFeatures out_grad;
               auto from = seed.begin();
               for (const auto& [degree, channels] : out) {
                 const auto to = from + kNodes * channels * (2 * degree + 1);
                 out_grad[degree].assign(from, to);
                 from = to;
               }
               return load(weights).Backward(
                   ctx, edges, nodes(inputs), inputs.at("edge").data(), out_grad,
                   {.nodes = {{0, grads.at("x0").data()}, {1, grads.at("x1").data()}},
                    .edge = grads.at("edge").data(),
                    .xyz = grads.at("xyz").data()},
                   parameters);
             }});
}

TEST_F(GradientTilesTest, ProteinMpnnLayers) {
  constexpr int64_t kNodes = 210, kEdges = 5000, kHidden = 8;
  const graph::Graph graph = Edges(kNodes, kEdges, 200).Build();
  for (const bool encoder : {true, false}) {
    NamedArrays inputs = {{"nodes", Normal(kNodes * kHidden)}, {"edge", Normal(kEdges * kHidden)}};
    if (!encoder) inputs["src"] = Normal(kNodes * 2 * kHidden);
    const auto arrays = [encoder](const NamedArrays& x) {
      return MpnnLayerInputs{.nodes = x.at("nodes").data(),
                             .src = encoder ? nullptr : x.at("src").data(),
                             .edge = x.at("edge").data()};
    };
    Check({.name = encoder ? "mpnn_encoder" : "mpnn_decoder",
           .inputs = inputs,
           .run =
               [=](const auto& ctx, const auto& weights, const auto& inputs) {
                 std::vector<float> out(kNodes * kHidden + (encoder ? kEdges * kHidden : 0));
                 float* edge_out = encoder ? out.data() + kNodes * kHidden : nullptr;
                 const auto layer = *MpnnLayer::Load(WeightScope(weights));
                 EXPECT_TRUE(layer.Run(ctx, graph, arrays(inputs), out.data(), edge_out).ok());
                 return out;
               },
           .backward =
               [=](const auto& ctx, const auto& weights, const auto& inputs, const auto& seed, auto& grads,
                   const auto& parameters) {
                 const auto layer = *MpnnLayer::Load(WeightScope(weights));
                 return layer.Backward(ctx, graph, arrays(inputs),
                                       {.nodes_out = seed.data(),
                                        .edge_out = encoder ? seed.data() + kNodes * kHidden : nullptr,
                                        .nodes = grads.at("nodes").data(),
                                        .src = encoder ? nullptr : grads.at("src").data(),
                                        .edge = grads.at("edge").data()},
                                       parameters);
               }});
  }
}

}  // namespace
}  // namespace moesaic::science
