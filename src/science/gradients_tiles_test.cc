// Backward passes on sizes above their blocks of edges, rows and queries: against differences of the forward
// pass, and bitwise equal for one and three threads. gradients_test.cc has the exact comparison on small
// sizes.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "science/egnn.h"
#include "science/evoformer.h"
#include "science/invariant_points.h"
#include "science/protein/protein_mpnn.h"
#include "science/se3/se3_layers.h"
#include "science/structure_module.h"
#include "science/test_gradients.h"

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
  std::string goldens = "gradients";  // file with the weights
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

  NamedArrays GradientsOf(const TileCase& c, const WeightMap& weights, const std::vector<float>& seed,
                          int threads) {
    const auto workspace = graph::MakeWorkspace(graph::GraphIsas().back(), threads);
    NamedArrays grads;
    ZeroGradients parameters(weights);
    for (const auto& [key, values] : c.inputs) grads[key].resize(values.size());
    EXPECT_TRUE(c.backward(workspace->context(), weights, c.inputs, seed, grads, parameters.map).ok())
        << c.name;
    grads.merge(parameters.values);
    return grads;
  }

  void Check(const TileCase& c) {
    const WeightMap weights = Goldens(c.goldens).Weights(c.name + ".weights.");
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

  std::mt19937 rng_{11};
  std::normal_distribution<float> normal_;
};

TEST_F(GradientTilesTest, TriangleMultiplicationMatchesDifferences) {
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

TEST_F(GradientTilesTest, TriangleAttentionMatchesDifferences) {
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

TEST_F(GradientTilesTest, AttentionOfAlignmentsMatchesDifferences) {
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

TEST_F(GradientTilesTest, OuterProductMeanMatchesDifferences) {
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

TEST_F(GradientTilesTest, InvariantPointAttentionMatchesDifferences) {
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

TEST_F(GradientTilesTest, EgnnMatchesDifferences) {
  constexpr int64_t kNodes = 210, kEdges = 5000;  // two blocks of edges
  const graph::Graph graph = graph::RandomEdges(&rng_, kNodes, kNodes, kEdges, false, false).Build();
  struct LayerCase {
    std::string name;
    EgnnOptions options;
    bool moves = true;
  };
  const LayerCase cases[] = {
      {"egnn.plain", {}},
      {"egnn.gated", {.residual = true, .mean_coordinates = false, .normalize = true, .tanh = true}},
      {"egnn.gated", {}, false}};
  for (const LayerCase& c : cases) {
    // Without the coordinate perceptron, its weights have gradients and differences of 0.
    const auto load = [c](WeightMap weights) {
      if (!c.moves) std::erase_if(weights, [](const auto& w) { return w.first.starts_with("coord_mlp."); });
      return *EgnnLayer::Load(WeightScope(weights), 6, 3, c.options);
    };
    Check({.name = c.name,
           .inputs = {{"h", Normal(kNodes * 6)}, {"x", Normal(kNodes * 3)}, {"edge", Normal(kEdges * 3)}},
           .run =
               [graph, load](const auto& ctx, const auto& weights, const auto& inputs) {
                 const auto layer = load(weights);
                 const int64_t h_size = kNodes * layer.outputs();
                 std::vector<float> out(h_size + kNodes * 3);
                 EXPECT_TRUE(layer
                                 .Run(ctx, graph, inputs.at("h").data(), inputs.at("x").data(),
                                      inputs.at("edge").data(), out.data(), out.data() + h_size)
                                 .ok());
                 return out;
               },
           .backward =
               [graph, load](const auto& ctx, const auto& weights, const auto& inputs, const auto& seed,
                             auto& grads, const auto& parameters) {
                 const auto layer = load(weights);
                 return layer.Backward(
                     ctx, graph, inputs.at("h").data(), inputs.at("x").data(), inputs.at("edge").data(),
                     seed.data(), seed.data() + kNodes * layer.outputs(),
                     {grads.at("h").data(), grads.at("x").data(), grads.at("edge").data()}, parameters);
               }});
  }
}

TEST_F(GradientTilesTest, EquivariantAttentionMatchesDifferences) {
  constexpr int64_t kNodes = 40, kEdges = 700;  // 200 edges of one source are in several tiles
  const graph::Graph graph = graph::RandomEdges(&rng_, kNodes, kNodes, kEdges, false, false).Build();
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

TEST_F(GradientTilesTest, ProteinMpnnLayersMatchDifferences) {
  constexpr int64_t kNodes = 210, kEdges = 5000, kHidden = 8;
  const graph::Graph graph = graph::RandomEdges(&rng_, kNodes, kNodes, kEdges, false, false).Build();
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

TEST_F(GradientTilesTest, EvoformerBlockMatchesDifferences) {
  constexpr int64_t kSequences = 50, kResidues = 48;  // 2304 rows of pairs, 2400 of the alignment
  constexpr int64_t kMsaSize = kSequences * kResidues * 6;
  const auto load = [](const WeightMap& weights) {
    return *EvoformerBlock::Load(WeightScope(weights), 2, 2);
  };
  Check({.name = "evoformer",
         .inputs = {{"m", Normal(kMsaSize)}, {"z", Normal(kResidues * kResidues * 5)}},
         .tolerance = 0.05,
         .goldens = "model_gradients",
         .run =
             [=](const auto& ctx, const auto& weights, const auto& inputs) {
               std::vector<float> m = inputs.at("m"), z = inputs.at("z");
               EXPECT_TRUE(
                   load(weights).Run(ctx, kSequences, kResidues, nullptr, nullptr, m.data(), z.data()).ok());
               m.insert(m.end(), z.begin(), z.end());
               return m;
             },
         .backward =
             [=](const auto& ctx, const auto& weights, const auto& inputs, const auto& seed, auto& grads,
                 const auto& parameters) {
               return load(weights).Backward(ctx, kSequences, kResidues, nullptr, nullptr,
                                             inputs.at("m").data(), inputs.at("z").data(),
                                             {.m_out = seed.data(),
                                              .z_out = seed.data() + kMsaSize,
                                              .m = grads.at("m").data(),
                                              .z = grads.at("z").data()},
                                             parameters);
             }});
}

TEST_F(GradientTilesTest, ProteinMpnnMatchesDifferences) {
  constexpr int kResidues = 110, kNeighbors = 48;  // 5280 edges
  MpnnInput input;
  input.known.assign(kResidues, 1);
  input.chain.assign(kResidues, 1);
  input.designed.assign(kResidues, 1);
  std::vector<int32_t> order;
  for (int i = 0; i < kResidues; ++i) {
    input.index.push_back(i);
    input.sequence.push_back(static_cast<int32_t>(rng_() % kMpnnLetters));
    order.push_back((i * 7) % kResidues);
  }
  // Backward() takes neighbours as constant, and so does a difference whose steps change none of them: a
  // chain of residues along a line, with the same number of neighbours on both sides.
  std::vector<float> xyz;
  for (int i = 0; i < kResidues; ++i) {
    const float at[] = {0.3F * static_cast<float>(i) + 0.001F * static_cast<float>(i * i), 0, 0};
    for (int atom = 0; atom < 4; ++atom) {
      for (const float x : at) xyz.push_back(x + (atom == 1 ? 0 : 1.3F * normal_(rng_)));
    }
  }
  const auto with = [=](const std::vector<float>& positions) {
    MpnnInput moved = input;
    moved.xyz = positions;
    return moved;
  };
  const auto load = [](const WeightMap& weights) { return *ProteinMpnn::Load(weights, kNeighbors); };
  Check({.name = "protein_mpnn",
         .inputs = {{"xyz", xyz}},
         .step = 0x1p-12F,
         .tolerance = 0.02,
         .goldens = "model_gradients",
         .run =
             [=](const auto& ctx, const auto& weights, const auto& inputs) {
               const MpnnInput backbone = with(inputs.at("xyz"));
               const ProteinMpnn model = load(weights);
               return *model.LogProbabilities(ctx, backbone, *model.Encode(ctx, backbone), backbone.sequence,
                                              order);
             },
         .backward =
             [=](const auto& ctx, const auto& weights, const auto& inputs, const auto& seed, auto& grads,
                 const auto& parameters) {
               const MpnnInput backbone = with(inputs.at("xyz"));
               return load(weights).Backward(ctx, backbone, backbone.sequence, order, seed.data(),
                                             grads.at("xyz").data(), parameters);
             }});
}

TEST_F(GradientTilesTest, StructureModuleMatchesDifferences) {
  constexpr int64_t kResidues = 70, kBlocks = 3, kSingle = 8;
  constexpr int64_t kSizes[] = {7, 14, 14, 128, 42};  // of the results of one residue and iteration
  std::vector<int32_t> types;
  for (int64_t i = 0; i < kResidues; ++i) types.push_back(static_cast<int32_t>(rng_() % 5));
  const WeightMap geometry = Goldens("model_gradients").Weights("structure.full.geometry.");
  const auto load = [=](WeightMap weights) {
    weights.insert(geometry.begin(), geometry.end());
    return *StructureModule::Load(WeightScope(weights), {2, 3, 2, 3}, kBlocks);
  };
  // All results, one after the other.
  const auto parts = [=](auto* all) {
    std::vector<decltype(all)> found;
    for (const int64_t size : kSizes) {
      found.push_back(all);
      all += kBlocks * kResidues * size;
    }
    found.push_back(all);
    return found;
  };
  Check({.name = "structure.full",
         .inputs = {{"single", Normal(kResidues * kSingle)}, {"pair", Normal(kResidues * kResidues * 6)}},
         .step = 0x1p-10F,
         .tolerance = 0.05,
         .goldens = "model_gradients",
         .run =
             [=](const auto& ctx, const auto& weights, const auto& inputs) {
               std::vector<float> out(kResidues * (kBlocks * 205 + kSingle));
               const auto at = parts(out.data());
               EXPECT_TRUE(load(weights)
                               .Run(ctx, kResidues, inputs.at("single").data(), inputs.at("pair").data(),
                                    types.data(), nullptr, {at[0], at[1], at[2], at[3], at[4], at[5]})
                               .ok());
               return out;
             },
         .backward =
             [=](const auto& ctx, const auto& weights, const auto& inputs, const auto& seed, auto& grads,
                 const auto& parameters) {
               const auto at = parts(seed.data());
               return load(weights).Backward(ctx, kResidues, inputs.at("single").data(),
                                             inputs.at("pair").data(), types.data(), nullptr, false,
                                             {at[0], at[1], at[2], at[3], at[4], at[5],
                                              grads.at("single").data(), grads.at("pair").data()},
                                             parameters);
             }});
}

}  // namespace
}  // namespace moesaic::science
