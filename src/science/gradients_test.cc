// Backward passes of layers against PyTorch's gradients of transcriptions, on every instruction set.
#include <gtest/gtest.h>

#include <algorithm>

#include "science/egnn.h"
#include "science/evoformer.h"
#include "science/invariant_points.h"
#include "science/protein/mpnn_layer.h"
#include "science/se3/se3_layers.h"
#include "science/test_gradients.h"

namespace moesaic::science {
namespace {

class GradientsTest : public testing::TestWithParam<runtime::Isa> {
 protected:
  std::unique_ptr<graph::Workspace> workspace_ = graph::MakeWorkspace(GetParam(), 2);
  graph::Context ctx_ = workspace_->context();
  Goldens goldens_{"gradients"};

  std::vector<float> Floats(const std::string& name) const { return goldens_.Floats(name); }
  void ExpectInput(const std::string& name, const std::vector<float>& got, const std::string& key) const {
    ExpectClose(got, Floats(name + ".grad.input." + key), kGradientTolerance, key.c_str());
  }
};
INSTANTIATE_TEST_SUITE_P(Isa, GradientsTest, testing::ValuesIn(graph::GraphIsas()),
                         [](const auto& info) { return runtime::IsaName(info.param); });

TEST_P(GradientsTest, EgnnMatchesPyTorch) {
  const std::pair<std::string, EgnnOptions> cases[] = {
      {"egnn.plain", {}},
      {"egnn.gated", {.residual = true, .mean_coordinates = false, .normalize = true, .tanh = true}}};
  for (const auto& [name, options] : cases) {
    const WeightMap weights = goldens_.Weights(name + ".weights.");
    const std::vector<int32_t> src = goldens_.Ints(name + ".src"), dst = goldens_.Ints(name + ".dst");
    const std::vector<float> h = Floats(name + ".h"), x = Floats(name + ".x"), edge = Floats(name + ".edge");
    const auto edges = static_cast<int64_t>(src.size());
    const graph::Graph graph = *graph::Graph::FromCoo(graph::Indices::Of(src.data(), edges),
                                                      graph::Indices::Of(dst.data(), edges), 11, 11);
    const EgnnLayer layer = *EgnnLayer::Load(WeightScope(weights), 6, 3, options);
    std::vector<float> first_h;
    for (const int threads : {2, 5}) {
      const auto workspace = graph::MakeWorkspace(GetParam(), threads);
      std::vector<float> h_grad(h.size()), x_grad(x.size()), edge_grad(edge.size());
      const ParameterGradients parameters(goldens_, name);
      ASSERT_TRUE(layer
                      .Backward(workspace->context(), graph, h.data(), x.data(), edge.data(),
                                Floats(name + ".seed0").data(), Floats(name + ".seed1").data(),
                                {h_grad.data(), x_grad.data(), edge_grad.data()}, parameters.map())
                      .ok());
      ExpectInput(name, h_grad, "h");
      ExpectInput(name, x_grad, "x");
      ExpectInput(name, edge_grad, "edge");
      parameters.ExpectGoldens();
      if (first_h.empty()) first_h = h_grad;
      EXPECT_EQ(first_h, h_grad);  // for any number of threads
    }
  }
}

// Without a coordinate perceptron gradients are those of one whose result is 0.
TEST_P(GradientsTest, EgnnWithoutCoordinatePerceptronHasGradients) {
  for (const std::string name : {"egnn.plain", "egnn.gated"}) {
    WeightMap weights = goldens_.Weights(name + ".weights.");
    const std::vector<int32_t> src = goldens_.Ints(name + ".src"), dst = goldens_.Ints(name + ".dst");
    const std::vector<float> h = Floats(name + ".h"), x = Floats(name + ".x"), edge = Floats(name + ".edge"),
                             x_seed = Floats(name + ".seed1");
    const auto edges = static_cast<int64_t>(src.size());
    const graph::Graph graph = *graph::Graph::FromCoo(graph::Indices::Of(src.data(), edges),
                                                      graph::Indices::Of(dst.data(), edges), 11, 11);
    std::map<std::string, std::vector<float>> grads[2];
    for (const bool missing : {false, true}) {
      for (float& value : weights.at("coord_mlp.2.weight").values) value = 0;
      if (missing) std::erase_if(weights, [](const auto& w) { return w.first.starts_with("coord_mlp."); });
      const EgnnLayer layer = *EgnnLayer::Load(WeightScope(weights), 6, 3);
      std::map<std::string, std::vector<float>>& found = grads[missing];
      found = {{"h", std::vector<float>(h.size())},
               {"x", std::vector<float>(x.size())},
               {"edge", std::vector<float>(edge.size())}};
      GradientMap parameters;
      for (const auto& [key, tensor] : weights) {
        if (!key.starts_with("coord_mlp.")) found[key].resize(tensor.values.size());
      }
      for (auto& [key, values] : found) {
        if (weights.contains(key)) parameters[key] = values;
      }
      ASSERT_TRUE(layer
                      .Backward(ctx_, graph, h.data(), x.data(), edge.data(), Floats(name + ".seed0").data(),
                                x_seed.data(),
                                {found.at("h").data(), found.at("x").data(), found.at("edge").data()},
                                parameters)
                      .ok());
    }
    ASSERT_EQ(grads[0].size(), grads[1].size());
    for (const auto& [key, values] : grads[0])
      ExpectClose(grads[1].at(key), values, 1e-6F, (name + " " + key).c_str());
    EXPECT_NE(grads[1].at("x"), x_seed);  // distances have gradients
  }
}

// Without edges, only the node perceptron has gradients, and positions pass theirs on.
TEST_P(GradientsTest, EgnnWithoutEdgesMatchesDifferences) {
  const std::string name = "egnn.gated";
  const WeightMap weights = goldens_.Weights(name + ".weights.");
  const EgnnLayer layer = *EgnnLayer::Load(WeightScope(weights), 6, 3);
  const graph::Graph graph = *graph::Graph::FromCoo({}, {}, 11, 11);
  const std::vector<float> h = Floats(name + ".h"), x = Floats(name + ".x"), h_seed = Floats(name + ".seed0"),
                           x_seed = Floats(name + ".seed1");
  std::vector<float> h_grad(h.size()), x_grad(x.size());
  const ParameterGradients parameters(goldens_, name);
  ASSERT_TRUE(layer
                  .Backward(ctx_, graph, h.data(), x.data(), nullptr, h_seed.data(), x_seed.data(),
                            {h_grad.data(), x_grad.data(), nullptr}, parameters.map())
                  .ok());
  EXPECT_EQ(x_grad, x_seed);
  constexpr float kStep = 0x1p-6F;
  std::vector<float> differences(h.size());
  for (size_t i = 0; i < h.size(); ++i) {
    for (const float sign : {1.0F, -1.0F}) {
      std::vector<float> moved = h, h_out(h.size()), x_out(x.size());
      moved[i] += sign * kStep;
      ASSERT_TRUE(layer.Run(ctx_, graph, moved.data(), x.data(), nullptr, h_out.data(), x_out.data()).ok());
      for (size_t j = 0; j < h.size(); ++j) differences[i] += sign * h_seed[j] * h_out[j] / (2 * kStep);
    }
  }
  // A step of 2^-6 has an error of third order, and divides the rounding of the results.
  ExpectClose(h_grad, differences, 2e-3F, "h");
  for (const auto& [key, values] : parameters.values()) {
    const bool is_node = key.starts_with("node_mlp.");
    EXPECT_EQ(std::any_of(values.begin(), values.end(), [](float g) { return g != 0; }), is_node) << key;
  }
  const graph::Graph empty = *graph::Graph::FromCoo({}, {}, 0, 0);
  EXPECT_TRUE(
      layer.Backward(ctx_, empty, nullptr, nullptr, nullptr, nullptr, nullptr, {}, GradientMap{}).ok());
}

TEST_P(GradientsTest, ReducedPerceptronsMatchDifferences) {
  std::mt19937 rng(5);
  std::normal_distribution<float> normal;
  auto random = [&](int64_t size) {
    std::vector<float> x(size);
    for (float& value : x) value = 0.5F * normal(rng);
    return x;
  };
  constexpr int kDst = 3, kSrc = 4, kEdge = 2, kHidden = 9, kOut = 5;
  const graph::TestEdges edges = graph::RandomEdges(&rng, 7, 6, 30);
  const graph::Graph graph = edges.Build();
  std::vector<float> first = random(kHidden * (kDst + kSrc + 1 + kEdge)), bias = random(kHidden),
                     second = random(kOut * kHidden), shift = random(kOut), dst = random(6 * kDst),
                     src = random(7 * kSrc), edge = random(30 * kEdge), dst_xyz = random(18),
                     src_xyz = random(21);
  const std::vector<float> out_grad = random(6 * kOut);
  const EdgeMlpInputs inputs = {dst.data(), src.data(), edge.data(), dst_xyz.data(), src_xyz.data()};
  auto build = [&] {
    EdgeMlp mlp;
    EXPECT_TRUE(mlp.SplitFirst(kHidden, kDst, kSrc, true, kEdge, first, bias).ok());
    mlp.rest.push_back(*Dense::Pack(kOut, kHidden, second, shift));
    mlp.activate_last = false;
    return mlp;
  };
  auto loss = [&] {
    std::vector<float> out(6 * kOut);
    EXPECT_TRUE(EdgeMlpReduce(ctx_, graph, build(), inputs, graph::Reduce::kMean, 0.7F, out.data()).ok());
    double sum = 0;
    for (size_t i = 0; i < out.size(); ++i) sum += double{out[i]} * out_grad[i];
    return sum;
  };
  std::map<std::vector<float>*, std::vector<float>> grads;
  for (auto* x : {&first, &bias, &second, &shift, &dst, &src, &edge, &dst_xyz, &src_xyz})
    grads[x].resize(x->size());
  ASSERT_TRUE(EdgeMlpReduceBackward(ctx_, graph, build(), inputs, graph::Reduce::kMean, 0.7F, out_grad.data(),
                                    {.dst = grads[&dst].data(),
                                     .src = grads[&src].data(),
                                     .edge = grads[&edge].data(),
                                     .dst_xyz = grads[&dst_xyz].data(),
                                     .src_xyz = grads[&src_xyz].data(),
                                     .first_weight = grads[&first].data(),
                                     .first_bias = grads[&bias].data(),
                                     .rest = {{grads[&second].data(), grads[&shift].data()}}})
                  .ok());
  // A difference of four points has an error of h^4 f'/30; rounding of the loss, divided by h, is below 1e-3.
  constexpr float kStep = 0x1p-5F;
  for (auto& [x, grad] : grads) {
    for (size_t i = 0; i < x->size(); ++i) {
      const float before = (*x)[i];
      auto at = [&](float shift) {
        (*x)[i] = before + shift * kStep;
        return loss();
      };
      const double difference = (8 * (at(1) - at(-1)) - (at(2) - at(-2))) / (12 * kStep);
      (*x)[i] = before;
      EXPECT_NEAR(grad[i], difference, 1e-3) << i;
    }
  }
}

TEST_P(GradientsTest, TriangleMultiplicationMatchesPyTorch) {
  for (const bool incoming : {false, true}) {
    const std::string name = incoming ? "tri_mul_in" : "tri_mul_out";
    const WeightMap weights = goldens_.Weights(name + ".weights.");
    const auto layer = *TriangleMultiplication::Load(WeightScope(weights), incoming);
    const std::vector<float> z = Floats(name + ".z"), mask = Floats(name + ".mask");
    std::vector<float> z_grad(z.size());
    const ParameterGradients parameters(goldens_, name);
    ASSERT_TRUE(layer
                    .Backward(ctx_, goldens_.Shape(name + ".z")[0], mask.data(), z.data(),
                              Floats(name + ".seed0").data(), z_grad.data(), parameters.map())
                    .ok());
    ExpectInput(name, z_grad, "z");
    parameters.ExpectGoldens();
    const ParameterGradients alone(goldens_, name);  // without the gradient of z
    ASSERT_TRUE(layer
                    .Backward(ctx_, goldens_.Shape(name + ".z")[0], mask.data(), z.data(),
                              Floats(name + ".seed0").data(), nullptr, alone.map())
                    .ok());
    EXPECT_EQ(alone.values(), parameters.values());
  }
}

TEST_P(GradientsTest, TriangleAttentionMatchesPyTorch) {
  for (const bool ending : {false, true}) {
    const std::string name = ending ? "tri_att_end" : "tri_att_start";
    const WeightMap weights = goldens_.Weights(name + ".weights.");
    const auto layer = *TriangleAttention::Load(WeightScope(weights), 3, ending);
    const std::vector<float> z = Floats(name + ".z"), mask = Floats(name + ".mask");
    std::vector<float> first;
    for (const int threads : {1, 3}) {
      const auto workspace = graph::MakeWorkspace(GetParam(), threads);
      std::vector<float> z_grad(z.size());
      const ParameterGradients parameters(goldens_, name);
      ASSERT_TRUE(layer
                      .Backward(workspace->context(), goldens_.Shape(name + ".z")[0], mask.data(), z.data(),
                                Floats(name + ".seed0").data(), z_grad.data(), parameters.map())
                      .ok());
      ExpectInput(name, z_grad, "z");
      parameters.ExpectGoldens();
      if (first.empty()) first = z_grad;
      EXPECT_EQ(first, z_grad);
    }
  }
}

TEST_P(GradientsTest, AttentionOfAlignmentsMatchesPyTorch) {
  for (const bool row : {true, false}) {
    const std::string name = row ? "msa_att_row" : "msa_att_col";
    const WeightMap weights = goldens_.Weights(name + ".weights.");
    const auto layer = *MsaAttention::Load(WeightScope(weights), 3);
    const std::vector<int64_t> shape = goldens_.Shape(name + ".m");
    const std::vector<float> m = Floats(name + ".m"), mask = Floats(name + ".mask"),
                             z = row ? Floats(name + ".z") : std::vector<float>{};
    std::vector<float> m_grad(m.size()), z_grad(z.size());
    const ParameterGradients parameters(goldens_, name);
    ASSERT_TRUE(layer
                    .Backward(ctx_, shape[0], shape[1], mask.data(), row ? z.data() : nullptr, m.data(),
                              Floats(name + ".seed0").data(), row ? z_grad.data() : nullptr, m_grad.data(),
                              parameters.map())
                    .ok());
    ExpectInput(name, m_grad, "m");
    if (row) ExpectInput(name, z_grad, "z");
    parameters.ExpectGoldens();
  }
}

TEST_P(GradientsTest, OuterProductMeanMatchesPyTorch) {
  const std::string name = "outer_product_mean";
  const WeightMap weights = goldens_.Weights(name + ".weights.");
  const auto layer = *OuterProductMean::Load(WeightScope(weights));
  const std::vector<int64_t> shape = goldens_.Shape(name + ".m");
  const std::vector<float> m = Floats(name + ".m"), mask = Floats(name + ".mask");
  std::vector<float> m_grad(m.size());
  const ParameterGradients parameters(goldens_, name);
  ASSERT_TRUE(layer
                  .Backward(ctx_, shape[0], shape[1], mask.data(), m.data(), Floats(name + ".seed0").data(),
                            m_grad.data(), parameters.map())
                  .ok());
  ExpectInput(name, m_grad, "m");
  parameters.ExpectGoldens();
}

TEST_P(GradientsTest, EquivariantAttentionMatchesPyTorch) {
  const WeightMap weights = goldens_.Weights("se3.weights.");
  const Fiber in = {{0, 2}, {1, 3}}, fiber_out = {{0, 4}, {1, 4}, {2, 4}};
  const auto block = *Se3AttentionBlock::Load(WeightScope(weights), in, fiber_out, 3, 2, 2);
  const std::vector<int32_t> src = goldens_.Ints("se3.src"), dst = goldens_.Ints("se3.dst");
  const auto edges = static_cast<int64_t>(src.size());
  const std::vector<float> xyz = Floats("se3.xyz"), edge = Floats("se3.edge");
  const FiberFeatures nodes = {{0, Floats("se3.x0")}, {1, Floats("se3.x1")}},
                      out_grad = {
                          {0, Floats("se3.seed0")}, {1, Floats("se3.seed1")}, {2, Floats("se3.seed2")}};
  const Se3Graph graph =
      *Se3Graph::Create(*graph::Graph::FromCoo(graph::Indices::Of(src.data(), edges),
                                               graph::Indices::Of(dst.data(), edges), 11, 11),
                        xyz.data(), 2);
  std::vector<float> first;
  for (const int threads : {1, 3}) {
    const auto workspace = graph::MakeWorkspace(GetParam(), threads);
    std::vector<float> x0_grad(nodes.at(0).size()), x1_grad(nodes.at(1).size()), edge_grad(edge.size()),
        xyz_grad(xyz.size());
    const ParameterGradients parameters(goldens_, "se3");
    ASSERT_TRUE(block
                    .Backward(workspace->context(), graph, nodes, edge.data(), out_grad,
                              {.nodes = {{0, x0_grad.data()}, {1, x1_grad.data()}},
                               .edge = edge_grad.data(),
                               .xyz = xyz_grad.data()},
                              parameters.map())
                    .ok());
    ExpectInput("se3", x0_grad, "x0");
    ExpectInput("se3", x1_grad, "x1");
    ExpectInput("se3", edge_grad, "edge");
    ExpectInput("se3", xyz_grad, "xyz");
    parameters.ExpectGoldens();
    if (first.empty()) first = xyz_grad;
    EXPECT_EQ(first, xyz_grad);
  }
}

TEST_P(GradientsTest, ProteinMpnnLayersMatchPyTorch) {
  for (const bool encoder : {true, false}) {
    const std::string name = encoder ? "mpnn_encoder" : "mpnn_decoder";
    const WeightMap weights = goldens_.Weights(name + ".weights.");
    const auto layer = *MpnnLayer::Load(WeightScope(weights));
    const std::vector<int32_t> neighbor = goldens_.Ints(name + ".neighbor");
    const int64_t nodes = goldens_.Shape(name + ".nodes")[0], edges = static_cast<int64_t>(neighbor.size());
    std::vector<int32_t> ptr;
    for (int64_t i = 0; i <= nodes; ++i) ptr.push_back(static_cast<int32_t>(i * edges / nodes));
    const graph::Graph graph = *graph::Graph::FromCsc(graph::Indices::Of(ptr.data(), nodes + 1),
                                                      graph::Indices::Of(neighbor.data(), edges), nodes);
    const std::vector<float> h = Floats(name + ".nodes"), edge = Floats(name + ".edge"),
                             known = Floats(name + ".known"), both = Floats(name + ".both"),
                             seed = Floats(name + ".seed0"),
                             src = encoder ? std::vector<float>{} : Floats(name + ".src"),
                             edge_seed = encoder ? Floats(name + ".seed1") : std::vector<float>{};
    std::vector<float> h_grad(h.size()), edge_grad(edge.size()), src_grad(src.size());
    const ParameterGradients parameters(goldens_, name);
    ASSERT_TRUE(layer
                    .Backward(ctx_, graph,
                              {.nodes = h.data(),
                               .src = encoder ? nullptr : src.data(),
                               .edge = edge.data(),
                               .node_mask = known.data(),
                               .edge_mask = encoder ? both.data() : nullptr},
                              {.nodes_out = seed.data(),
                               .edge_out = encoder ? edge_seed.data() : nullptr,
                               .nodes = h_grad.data(),
                               .src = encoder ? nullptr : src_grad.data(),
                               .edge = edge_grad.data()},
                              parameters.map())
                    .ok());
    ExpectInput(name, h_grad, "nodes");
    ExpectInput(name, edge_grad, "edge");
    if (!encoder) ExpectInput(name, src_grad, "src");
    parameters.ExpectGoldens();
  }
}

TEST_P(GradientsTest, InvariantPointAttentionMatchesPyTorch) {
  const WeightMap weights = goldens_.Weights("ipa.weights.");
  const auto layer = *InvariantPointAttention::Load(
      WeightScope(weights), {.heads = 3, .dim = 5, .query_points = 4, .value_points = 6});
  const std::vector<float> s = Floats("ipa.s"), z = Floats("ipa.z"), rotation = Floats("ipa.rotation"),
                           translation = Floats("ipa.translation"), mask = Floats("ipa.mask");
  std::vector<float> grads[] = {std::vector<float>(s.size()), std::vector<float>(z.size()),
                                std::vector<float>(rotation.size()), std::vector<float>(translation.size())};
  const ParameterGradients parameters(goldens_, "ipa");
  ASSERT_TRUE(layer
                  .Backward(ctx_, static_cast<int64_t>(mask.size()), s.data(), z.data(),
                            {rotation.data(), translation.data()}, mask.data(), Floats("ipa.seed0").data(),
                            {grads[0].data(), grads[1].data(), grads[2].data(), grads[3].data()},
                            parameters.map())
                  .ok());
  ExpectInput("ipa", grads[0], "s");
  ExpectInput("ipa", grads[1], "z");
  ExpectInput("ipa", grads[2], "rotation");
  ExpectInput("ipa", grads[3], "translation");
  parameters.ExpectGoldens();
}

TEST_P(GradientsTest, SizesOfGradientsAreChecked) {
  const WeightMap weights = goldens_.Weights("tri_mul_out.weights.");
  const auto layer = *TriangleMultiplication::Load(WeightScope(weights), false);
  std::vector<float> short_bias(3), z(10);
  EXPECT_EQ(moesaic::Message(layer.Backward(ctx_, 1, nullptr, z.data(), z.data(), nullptr,
                                            {{"linear_z.bias", short_bias}})),
            "the gradient of \"linear_z.bias\" must have 10 elements, but has 3");
}

}  // namespace
}  // namespace moesaic::science
