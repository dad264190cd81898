// Backward passes of SE(3) layers, and of a model of them, against differences of the forward pass. Biases
// keep the inputs of all ReLUs away from 0, so that the differences are those of smooth functions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "science/se3/se3_layers.h"
#include "science/test_gradients.h"

namespace moesaic::science {
namespace {

using NamedValues = std::map<std::string, std::vector<float>>;

constexpr int kModelNodes = 8, kModelEdges = 30, kModelEdgeInputs = 2;
const Fiber kModelIn = {{0, 2}, {1, 2}}, kModelHidden = {{1, 4}, {2, 4}}, kModelOut = {{0, 2}, {1, 1}};

// A layer or a model as a function of named inputs and weights.
struct Se3Function {
  std::function<FiberFeatures(const graph::Context&, const WeightMap&, const NamedValues& inputs)> run;
  // Adds the gradients for `seed`, those of the results.
  std::function<Status(const graph::Context&, const WeightMap&, const NamedValues& inputs,
                       const FiberFeatures& seed, NamedValues& grads, const GradientMap& parameters)>
      backward;
};

FiberFeatures FeaturesOf(const NamedValues& inputs, const Fiber& fiber) {
  FiberFeatures features;
  for (const auto& [degree, channels] : fiber) features[degree] = inputs.at(fmt::format("x{}", degree));
  return features;
}

std::map<int, float*> PointersOf(NamedValues& grads, const Fiber& fiber) {
  std::map<int, float*> pointers;
  for (const auto& [degree, channels] : fiber) pointers[degree] = grads.at(fmt::format("x{}", degree)).data();
  return pointers;
}

// Zeros for the gradients of features, with their pointers.
struct HiddenGradients {
  FiberFeatures values;
  std::map<int, float*> pointers;

  explicit HiddenGradients(const FiberFeatures& features) {
    for (const auto& [degree, x] : features) {
      values[degree].assign(x.size(), 0);
      pointers[degree] = values[degree].data();
    }
  }
};

class Se3GradientsTest : public testing::TestWithParam<runtime::Isa> {
 protected:
  std::vector<float> Normal(int64_t size, float scale = 1) {
    std::vector<float> x(size);
    for (float& value : x) value = scale * normal_(rng_);
    return x;
  }
  // Elements of about this size, of which every third is negative.
  std::vector<float> Signed(int64_t size, float about, float spread = 0.1F) {
    std::vector<float> x = Normal(size, spread * about);
    for (int64_t i = 0; i < size; ++i) x[i] += i % 3 == 1 ? -about : about;
    return x;
  }
  static void Add(WeightMap* weights, const std::string& name, std::vector<int64_t> shape,
                  std::vector<float> values) {
    (*weights)[name] = {.shape = std::move(shape), .values = std::move(values)};
  }

  void AddNorm(WeightMap* weights, const std::string& name, int64_t channels) {
    // The largest element of a normalized row is at most sqrt(channels - 1).
    const float beta = 0.5F * std::sqrt(static_cast<float>(channels)) + 1;
    Add(weights, name + ".weight", {channels}, std::vector<float>(channels, 0.4F));
    Add(weights, name + ".bias", {channels}, Signed(channels, beta));
  }
  void AddConv(WeightMap* weights, const std::string& prefix, const Fiber& in, const Fiber& out, bool norms,
               bool self) {
    constexpr int64_t kHidden = 8;
    for (const auto& [d_out, c_out] : out) {
      for (const auto& [d_in, c_in] : in) {
        const std::string net = fmt::format("{}conv.{},{}.radial_func.net.", prefix, d_in, d_out);
        const std::string second = norms ? "3" : "2", last = norms ? "6" : "4";
        Add(weights, net + "0.weight", {kHidden, kModelEdgeInputs + 1},
            Normal(kHidden * (kModelEdgeInputs + 1), 0.2F));
        Add(weights, net + "0.bias", {kHidden}, Signed(kHidden, 3));
        Add(weights, net + second + ".weight", {kHidden, kHidden}, Normal(kHidden * kHidden, 0.05F));
        Add(weights, net + second + ".bias", {kHidden}, Signed(kHidden, 3));
        if (norms) {
          AddNorm(weights, net + "1", kHidden);
          AddNorm(weights, net + "4", kHidden);
        }
        const int64_t rows = int64_t{c_out} * c_in * (2 * std::min(d_in, d_out) + 1);
        Add(weights, net + last + ".weight", {rows, kHidden}, Normal(rows * kHidden, 0.2F));
      }
      const auto from = in.find(d_out);
      if (!self || from == in.end()) continue;
      Add(weights, fmt::format("{}to_kernel_self.{}", prefix, d_out), {c_out, from->second},
          Normal(int64_t{c_out} * from->second, 0.5F));
    }
  }
  void AddLinear(WeightMap* weights, const std::string& prefix, const Fiber& in, const Fiber& out) {
    for (const auto& [degree, channels] : out) {
      Add(weights, fmt::format("{}weights.{}", prefix, degree), {channels, in.at(degree)},
          Normal(int64_t{channels} * in.at(degree), 0.5F));
    }
  }

  // Features of nodes, none of which is near 0, and of edges, and positions that are apart.
  NamedValues Inputs(const Fiber& fiber) {
    NamedValues inputs;
    for (const auto& [degree, channels] : fiber)
      inputs[fmt::format("x{}", degree)] =
          Signed(int64_t{kModelNodes} * channels * (2 * degree + 1), 1, 0.2F);
    inputs["edge"] = Normal(kModelEdges * kModelEdgeInputs, 0.5F);
    inputs["xyz"] = Normal(3 * kModelNodes, 0.15F);
    for (int i = 0; i < kModelNodes; ++i) {
      for (int axis = 0; axis < 3; ++axis)
        inputs["xyz"][3 * i + axis] += 1.5F * static_cast<float>((i >> axis) & 1);
    }
    return inputs;
  }
  Se3Graph EdgesOf(const NamedValues& inputs) const {
    return *Se3Graph::Create(graph_, inputs.at("xyz").data(), 2);
  }

  NamedValues GradientsOf(const Se3Function& f, const WeightMap& weights, const NamedValues& inputs,
                          const FiberFeatures& seed, int threads) const {
    const auto workspace = graph::MakeWorkspace(GetParam(), threads);
    NamedValues grads;
    ZeroGradients parameters(weights);
    for (const auto& [key, values] : inputs) grads[key].resize(values.size());
    EXPECT_TRUE(f.backward(workspace->context(), weights, inputs, seed, grads, parameters.map).ok());
    grads.merge(parameters.values);
    return grads;
  }

  void ExpectDifferences(const Se3Function& f, const WeightMap& weights, const NamedValues& inputs) {
    constexpr float kStep = 0x1p-7F;
    FiberFeatures seed;
    double size = 0, largest = 0;
    for (const auto& [degree, values] : f.run(ctx_, weights, inputs)) {
      seed[degree] = Normal(static_cast<int64_t>(values.size()));
      size += static_cast<double>(values.size());
      for (const float x : values) largest = std::max(largest, std::abs(double{x}));
    }
    const NamedValues grads = GradientsOf(f, weights, inputs, seed, 1);
    for (const int threads : {2, 3}) EXPECT_EQ(grads, GradientsOf(f, weights, inputs, seed, threads));
    // The difference of four points has an error of fifth order, and that of the rounding of results.
    const double rounding = 1e-6 * largest * std::sqrt(size) / kStep;
    for (const auto& named : grads) {
      const std::string& key = named.first;
      const std::vector<float>& grad = named.second;
      const std::vector<float> direction = Normal(static_cast<int64_t>(grad.size()));
      auto loss = [&](float steps) {
        NamedValues moved_inputs = inputs;
        WeightMap moved = weights;
        std::vector<float>& values = inputs.contains(key) ? moved_inputs.at(key) : moved.at(key).values;
        for (size_t i = 0; i < values.size(); ++i) values[i] += steps * kStep * direction[i];
        double sum = 0;
        for (const auto& [degree, results] : f.run(ctx_, moved, moved_inputs)) {
          const std::vector<float>& by = seed.at(degree);
          for (size_t i = 0; i < by.size(); ++i) sum += double{by[i]} * results[i];
        }
        return sum;
      };
      const double difference = (8 * (loss(1) - loss(-1)) - (loss(2) - loss(-2))) / (12 * kStep);
      double derivative = 0, norm = 0;
      for (size_t i = 0; i < grad.size(); ++i) {
        derivative += double{grad[i]} * direction[i];
        norm += double{grad[i]} * grad[i];
      }
      EXPECT_NEAR(derivative, difference, 0.01 * std::sqrt(norm) + rounding) << key;
    }
  }

  std::mt19937 rng_{23};
  std::normal_distribution<float> normal_;
  std::unique_ptr<graph::Workspace> workspace_ = graph::MakeWorkspace(GetParam(), 2);
  graph::Context ctx_ = workspace_->context();
  graph::Graph graph_ =
      graph::RandomEdges(&rng_, kModelNodes, kModelNodes, kModelEdges, false, false).Build();
};
INSTANTIATE_TEST_SUITE_P(Isa, Se3GradientsTest, testing::ValuesIn(graph::GraphIsas()),
                         [](const auto& info) { return runtime::IsaName(info.param); });

TEST_P(Se3GradientsTest, LinearMatchesDifferences) {
  const Fiber in = {{0, 3}, {1, 2}, {2, 5}}, out = {{0, 4}, {2, 3}};  // degree 1 is not used
  WeightMap weights;
  AddLinear(&weights, "", in, out);
  NamedValues inputs = Inputs(in);
  inputs.erase("edge");
  inputs.erase("xyz");
  ExpectDifferences({.run =
                         [&](const auto& ctx, const auto& w, const auto& x) {
                           const auto layer = *Se3Linear::Load(WeightScope(w), in, out);
                           return *layer.Run(ctx, kModelNodes, FeaturesOf(x, in));
                         },
                     .backward =
                         [&](const auto& ctx, const auto& w, const auto& x, const auto& seed, auto& grads,
                             const auto& parameters) {
                           const auto layer = *Se3Linear::Load(WeightScope(w), in, out);
                           return layer.Backward(ctx, kModelNodes, FeaturesOf(x, in), seed,
                                                 PointersOf(grads, in), GradientScope(parameters));
                         }},
                    weights, inputs);
}

TEST_P(Se3GradientsTest, NormMatchesDifferences) {
  const Fiber fiber = {{0, 5}, {1, 3}, {2, 4}};
  WeightMap weights;
  for (const auto& [degree, channels] : fiber)
    AddNorm(&weights, fmt::format("layer_norms.{}", degree), channels);
  NamedValues inputs = Inputs(fiber);
  inputs.erase("edge");
  inputs.erase("xyz");
  // Channels of one length have a variance of 0, near which differences are not exact.
  for (const auto& [degree, channels] : fiber) {
    const int64_t dim = 2 * degree + 1;
    std::vector<float>& x = inputs.at(fmt::format("x{}", degree));
    for (int64_t i = 0; i < std::ssize(x); ++i) x[i] *= 1 + 0.5F * static_cast<float>(i / dim % channels);
  }
  ExpectDifferences({.run =
                         [&](const auto& ctx, const auto& w, const auto& x) {
                           const auto layer = *Se3Norm::Load(WeightScope(w), fiber);
                           return *layer.Run(ctx, kModelNodes, FeaturesOf(x, fiber));
                         },
                     .backward =
                         [&](const auto& ctx, const auto& w, const auto& x, const auto& seed, auto& grads,
                             const auto& parameters) {
                           const auto layer = *Se3Norm::Load(WeightScope(w), fiber);
                           return layer.Backward(ctx, kModelNodes, FeaturesOf(x, fiber), seed,
                                                 PointersOf(grads, fiber), GradientScope(parameters));
                         }},
                    weights, inputs);
}

// Rows above the parts of the sums, with vectors of zeros.
TEST_P(Se3GradientsTest, NormOfManyRowsDoesNotDependOnThreadsOrNames) {
  constexpr int64_t kRows = 5000;
  constexpr int kChannels = 3;
  const Fiber fiber = {{0, kChannels}, {1, kChannels}};
  WeightMap named, grouped;
  for (const char* part : {"weight", "bias"}) {
    std::vector<float> all;
    for (const int degree : {0, 1}) {
      const std::vector<float> values = Normal(kChannels);
      Add(&named, fmt::format("layer_norms.{}.{}", degree, part), {kChannels}, values);
      all.insert(all.end(), values.begin(), values.end());
    }
    Add(&grouped, fmt::format("group_norm.{}", part), {2 * kChannels}, all);
  }
  FiberFeatures x = {{0, Normal(kRows * kChannels)}, {1, Normal(kRows * kChannels * 3)}};
  std::fill_n(x[0].begin(), kChannels, 0.0F);
  std::fill_n(x[1].begin() + 9, 9, 0.0F);
  const FiberFeatures seed = {{0, Normal(kRows * kChannels)}, {1, Normal(kRows * kChannels * 3)}};
  std::vector<FiberFeatures> results, gradients;
  std::vector<std::vector<float>> sums;  // of weights, then of biases, in the order of degrees
  for (const WeightMap* weights : {&named, &grouped}) {
    const auto layer = *Se3Norm::Load(WeightScope(*weights), fiber);
    for (const int threads : {1, 2, 3}) {
      const auto workspace = graph::MakeWorkspace(GetParam(), threads);
      results.push_back(*layer.Run(workspace->context(), kRows, x));
      HiddenGradients hidden(x);
      const ZeroGradients parameters(*weights);
      ASSERT_TRUE(
          layer.Backward(workspace->context(), kRows, x, seed, hidden.pointers, GradientScope(parameters.map))
              .ok());
      gradients.push_back(hidden.values);
      sums.emplace_back();
      for (const char* part : {"weight", "bias"}) {
        for (const auto& [key, values] : parameters.values) {
          if (key.ends_with(part)) sums.back().insert(sums.back().end(), values.begin(), values.end());
        }
      }
    }
  }
  for (size_t i = 1; i < results.size(); ++i) {
    EXPECT_EQ(results[i], results[0]);
    EXPECT_EQ(gradients[i], gradients[0]);
    EXPECT_EQ(sums[i], sums[0]);
  }
  for (const auto& [degree, values] : gradients[0]) {
    for (const float g : values) ASSERT_TRUE(std::isfinite(g)) << degree;
  }
}

TEST_P(Se3GradientsTest, ConvolutionMatchesDifferences) {
  const Fiber out = {{0, 3}, {1, 2}, {2, 1}};
  for (const bool norms : {false, true}) {
    WeightMap weights;
    AddConv(&weights, "", kModelIn, out, norms, true);
    const auto load = [&](const WeightMap& w) {
      return *Se3Conv::Load(WeightScope(w), kModelIn, out, kModelEdgeInputs);
    };
    ExpectDifferences({.run =
                           [&](const auto& ctx, const auto& w, const auto& x) {
                             return *load(w).RunNodes(ctx, EdgesOf(x), FeaturesOf(x, kModelIn),
                                                      x.at("edge").data());
                           },
                       .backward =
                           [&](const auto& ctx, const auto& w, const auto& x, const auto& seed, auto& grads,
                               const auto& parameters) {
                             return load(w).BackwardNodes(ctx, EdgesOf(x), FeaturesOf(x, kModelIn),
                                                          x.at("edge").data(), seed,
                                                          {.nodes = PointersOf(grads, kModelIn),
                                                           .edge = grads.at("edge").data(),
                                                           .xyz = grads.at("xyz").data()},
                                                          parameters);
                           }},
                      weights, Inputs(kModelIn));
  }
}

// An attention block, a norm and a convolution, with the names of NVIDIA's program.
struct Se3Model {
  Se3AttentionBlock block;
  Se3Norm norm;
  Se3Conv conv;

  static Se3Model Load(const WeightMap& weights) {
    const WeightScope modules = WeightScope(weights).Under("graph_modules");
    return {*Se3AttentionBlock::Load(modules.Under("0"), kModelIn, kModelHidden, kModelEdgeInputs, 2, 2),
            *Se3Norm::Load(modules.Under("1"), kModelHidden),
            *Se3Conv::Load(modules.Under("2"), kModelHidden, kModelOut, kModelEdgeInputs)};
  }
};

TEST_P(Se3GradientsTest, ModelMatchesDifferences) {
  WeightMap weights;
  const std::string block = "graph_modules.0.";
  AddConv(&weights, block + "to_key_value.", kModelIn, {{1, 4}, {2, 2}}, true, false);
  AddLinear(&weights, block + "to_query.", kModelIn, {{1, 2}});
  AddLinear(&weights, block + "project.", {{1, 4}, {2, 2}}, kModelHidden);
  AddNorm(&weights, "graph_modules.1.group_norm", 8);
  AddConv(&weights, "graph_modules.2.", kModelHidden, kModelOut, true, true);
  ExpectDifferences(
      {.run =
           [&](const auto& ctx, const auto& w, const auto& x) {
             const Se3Model model = Se3Model::Load(w);
             const Se3Graph edges = EdgesOf(x);
             const float* edge = x.at("edge").data();
             const FiberFeatures hidden = *model.block.Run(ctx, edges, FeaturesOf(x, kModelIn), edge);
             return *model.conv.RunNodes(ctx, edges, *model.norm.Run(ctx, kModelNodes, hidden), edge);
           },
       .backward = [&](const auto& ctx, const auto& w, const auto& x, const auto& seed, auto& grads,
                       const auto& parameters) -> Status {
         const Se3Model model = Se3Model::Load(w);
         const Se3Graph edges = EdgesOf(x);
         const FiberFeatures nodes = FeaturesOf(x, kModelIn);
         const float* edge = x.at("edge").data();
         float *edge_grad = grads.at("edge").data(), *xyz_grad = grads.at("xyz").data();
         ASSIGN_OR_RETURN(const FiberFeatures hidden, model.block.Run(ctx, edges, nodes, edge));
         ASSIGN_OR_RETURN(const FiberFeatures scaled, model.norm.Run(ctx, kModelNodes, hidden));
         const HiddenGradients scaled_grad(scaled), hidden_grad(hidden);
         RETURN_IF_ERROR(
             model.conv.BackwardNodes(ctx, edges, scaled, edge, seed,
                                      {.nodes = scaled_grad.pointers, .edge = edge_grad, .xyz = xyz_grad},
                                      GradientsUnder(parameters, "graph_modules.2")));
         RETURN_IF_ERROR(model.norm.Backward(ctx, kModelNodes, hidden, scaled_grad.values,
                                             hidden_grad.pointers,
                                             GradientScope(parameters).Under("graph_modules.1")));
         return model.block.Backward(
             ctx, edges, nodes, edge, hidden_grad.values,
             {.nodes = PointersOf(grads, kModelIn), .edge = edge_grad, .xyz = xyz_grad},
             GradientsUnder(parameters, "graph_modules.0"));
       }},
      weights, Inputs(kModelIn));
}

TEST_P(Se3GradientsTest, WrongShapesAreNamed) {
  WeightMap weights;
  AddNorm(&weights, "group_norm", 7);
  EXPECT_EQ(moesaic::Message(Se3Norm::Load(WeightScope(weights), {{0, 4}, {1, 3}}).status()),
            "\"group_norm\" needs degrees with 4 channels each, but degree 1 has 3");
  AddNorm(&weights, "group_norm", 4);
  const auto norm = *Se3Norm::Load(WeightScope(weights), {{0, 2}, {1, 2}});
  const FiberFeatures x = {{0, Normal(2 * kModelNodes)}, {1, Normal(6 * kModelNodes)}};
  const FiberFeatures narrow = {{0, Normal(2 * kModelNodes)}, {1, Normal(5)}};
  const std::string message = "features of degree 1 must have 48 elements, but have 5";
  EXPECT_EQ(moesaic::Message(norm.Run(ctx_, kModelNodes, narrow).status()), message);
  EXPECT_EQ(moesaic::Message(norm.Backward(ctx_, kModelNodes, x, narrow, {}, GradientScope(GradientMap()))),
            message);
  AddLinear(&weights, "", {{0, 2}, {1, 2}}, {{1, 3}});
  const auto linear = *Se3Linear::Load(WeightScope(weights), {{0, 2}, {1, 2}}, {{1, 3}});
  EXPECT_EQ(moesaic::Message(linear.Run(ctx_, kModelNodes, narrow).status()), message);
  AddConv(&weights, "", kModelIn, kModelOut, false, true);
  const auto conv = *Se3Conv::Load(WeightScope(weights), kModelIn, kModelOut, kModelEdgeInputs);
  const NamedValues inputs = Inputs(kModelIn);
  EXPECT_EQ(moesaic::Message(conv.BackwardNodes(ctx_, EdgesOf(inputs), FeaturesOf(inputs, kModelIn),
                                                inputs.at("edge").data(),
                                                {{0, Normal(2 * kModelNodes)}, {1, Normal(5)}}, {}, {})),
            "features of degree 1 must have 24 elements, but have 5");
}

}  // namespace
}  // namespace moesaic::science
