// ProteinMPNN against a PyTorch transcription; sampling.
#include "science/protein/protein_mpnn.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "science/test_goldens.h"

namespace moesaic::science {
namespace {

class ProteinMpnnTest : public testing::TestWithParam<runtime::Isa> {
 protected:
  ProteinMpnnTest() {
    input_.xyz = goldens_.Floats("xyz");
    input_.index = goldens_.Ints("index");
    input_.chain = goldens_.Ints("chain");
    input_.sequence = goldens_.Ints("sequence");
    for (const int32_t known : goldens_.Ints("known")) input_.known.push_back(static_cast<uint8_t>(known));
    input_.designed.assign(input_.known.size(), 1);
  }
  Goldens goldens_{"protein_mpnn"};
  MpnnInput input_;
  ProteinMpnn model_ = *ProteinMpnn::Load(goldens_.Weights("weights."), 12);
  std::unique_ptr<graph::Workspace> workspace_ = graph::MakeWorkspace(GetParam(), 2);
};
INSTANTIATE_TEST_SUITE_P(Isa, ProteinMpnnTest, testing::ValuesIn(graph::GraphIsas()),
                         [](const auto& info) { return runtime::IsaName(info.param); });

TEST_P(ProteinMpnnTest, MatchesPyTorch) {
  const graph::Context ctx = workspace_->context();
  const MpnnEncoding encoding = *model_.Encode(ctx, input_);
  const std::vector<int32_t> neighbor = goldens_.Ints("neighbor");
  // The order of unknown residues is free: all of them are equally far away.
  for (int64_t i = 0; i < encoding.size; ++i) {
    if (input_.known[i] == 0) continue;
    for (int k = 0; k < encoding.neighbors; ++k)
      ASSERT_EQ(encoding.neighbor[i * 12 + k], neighbor[i * 12 + k]) << i << " " << k;
  }
  ExpectClose(encoding.nodes, goldens_.Floats("nodes"), 1e-5F, "nodes");
  const std::vector<float> logs =
      *model_.LogProbabilities(ctx, input_, encoding, input_.sequence, goldens_.Ints("order"));
  std::vector<float> got, want;
  const std::vector<float> golden = goldens_.Floats("log_probabilities");
  for (int64_t i = 0; i < encoding.size; ++i) {
    if (input_.known[i] == 0) continue;
    got.insert(got.end(), logs.begin() + i * kMpnnLetters, logs.begin() + (i + 1) * kMpnnLetters);
    want.insert(want.end(), golden.begin() + i * kMpnnLetters, golden.begin() + (i + 1) * kMpnnLetters);
  }
  ExpectClose(got, want, 1e-5F, "log-probabilities");
}

TEST_P(ProteinMpnnTest, DoesNotDependOnThreads) {
  MpnnEncoding first;
  std::vector<float> first_logs;
  for (const int threads : {1, 2, 3}) {
    const auto workspace = graph::MakeWorkspace(GetParam(), threads);
    const MpnnEncoding encoding = *model_.Encode(workspace->context(), input_);
    const std::vector<float> logs = *model_.LogProbabilities(workspace->context(), input_, encoding,
                                                             input_.sequence, goldens_.Ints("order"));
    if (threads == 1) {
      first = encoding;
      first_logs = logs;
    }
    EXPECT_EQ(encoding.neighbor, first.neighbor);
    EXPECT_EQ(encoding.nodes, first.nodes);
    EXPECT_EQ(encoding.edges, first.edges);
    EXPECT_EQ(logs, first_logs);
  }
}

TEST_P(ProteinMpnnTest, SamplesAgreeWithTheirLogProbabilities) {
  const graph::Context ctx = workspace_->context();
  const MpnnEncoding encoding = *model_.Encode(ctx, input_);
  for (int i = 0; i < 10; ++i) input_.designed[i] = 0;
  const MpnnSample sample = *model_.Sample(ctx, input_, encoding, {.temperature = 1, .seed = 5});
  const std::vector<int32_t> order = DecodingOrder(input_, 5);
  const std::vector<float> logs = *model_.LogProbabilities(ctx, input_, encoding, sample.sequence, order);
  double score = 0;
  int count = 0;
  for (int64_t i = 0; i < encoding.size; ++i) {
    if (i < 10 || input_.known[i] == 0) {
      EXPECT_EQ(sample.sequence[i], input_.sequence[i]);
      continue;
    }
    EXPECT_NE(sample.sequence[i], kMpnnLetters - 1);  // X is never chosen
    score -= logs[i * kMpnnLetters + sample.sequence[i]];
    ++count;
  }
  EXPECT_NEAR(sample.score, score / count, 1e-4);
  const MpnnSample again = *model_.Sample(ctx, input_, encoding, {.temperature = 1, .seed = 5});
  EXPECT_EQ(again.sequence, sample.sequence);
  const auto other = graph::MakeWorkspace(GetParam(), 1);
  EXPECT_EQ(model_
                .Sample(other->context(), input_, *model_.Encode(other->context(), input_),
                        {.temperature = 1, .seed = 5})
                ->sequence,
            sample.sequence);
}

TEST_P(ProteinMpnnTest, SamplesWithATransitionOfAnyWidth) {
  const graph::Context ctx = workspace_->context();
  constexpr int kHidden = 16, kWide = 1024;  // published: 4 H
  WeightMap weights = goldens_.Weights("weights.");
  auto widen = [](WeightTensor* tensor, std::vector<int64_t> shape) {
    const size_t old = tensor->values.size();
    int64_t size = 1;
    for (const int64_t n : tensor->shape = std::move(shape)) size *= n;
    for (size_t i = old; i < static_cast<size_t>(size); ++i)
      tensor->values.push_back(tensor->values[i - old]);
  };
  for (const std::string layer : {"decoder_layers.0.", "decoder_layers.1."}) {
    widen(&weights[layer + "dense.W_in.weight"], {kWide, kHidden});
    widen(&weights[layer + "dense.W_in.bias"], {kWide});
    widen(&weights[layer + "dense.W_out.weight"], {kHidden, kWide});
  }
  const ProteinMpnn wide = *ProteinMpnn::Load(weights, 2);
  const MpnnEncoding encoding = *wide.Encode(ctx, input_);
  const MpnnSample sample = *wide.Sample(ctx, input_, encoding, {.temperature = 1, .seed = 5});
  const std::vector<float> logs =
      *wide.LogProbabilities(ctx, input_, encoding, sample.sequence, DecodingOrder(input_, 5));
  double score = 0;
  int count = 0;
  for (int64_t i = 0; i < encoding.size; ++i) {
    if (input_.known[i] == 0) continue;
    score -= logs[i * kMpnnLetters + sample.sequence[i]];
    ++count;
  }
  EXPECT_NEAR(sample.score, score / count, 1e-4);
}

TEST_P(ProteinMpnnTest, OmittedLettersAreNeverChosen) {
  const graph::Context ctx = workspace_->context();
  const MpnnEncoding encoding = *model_.Encode(ctx, input_);
  const MpnnSample sample =
      *model_.Sample(ctx, input_, encoding, {.temperature = 10, .seed = 1, .omit = "CDEFGHIKLMNPQRSTVX"});
  for (int64_t i = 0; i < encoding.size; ++i) {
    if (input_.known[i] != 0) {
      EXPECT_NE(std::string("AWY").find(kMpnnAlphabet[sample.sequence[i]]), std::string::npos);
    }
  }
  EXPECT_FALSE(model_.Sample(ctx, input_, encoding, {.temperature = 0}).ok());
  // As the temperature falls, the choice becomes the likeliest letter of those that are not omitted.
  const MpnnSample cold = *model_.Sample(ctx, input_, encoding, {.temperature = 1e-6, .omit = "AWY"});
  for (int64_t i = 0; i < encoding.size; ++i) {
    if (input_.known[i] != 0) {
      EXPECT_EQ(std::string("AWY").find(kMpnnAlphabet[cold.sequence[i]]), std::string::npos);
    }
  }
  for (const double temperature : {1e-9, 1e-300, 5e-324}) {
    EXPECT_EQ(model_.Sample(ctx, input_, encoding, {.temperature = temperature, .omit = "AWY"})->sequence,
              cold.sequence)
        << temperature;
  }
  auto omitting = [&](const std::string& letters) {
    return moesaic::Message(model_.Sample(ctx, input_, encoding, {.omit = letters}).status());
  };
  EXPECT_EQ(omitting("Xa"), "\"a\" is no letter of ACDEFGHIKLMNPQRSTVWYX that can be omitted");
  EXPECT_EQ(omitting(std::string(kMpnnAlphabet)),
            "all letters of ACDEFGHIKLMNPQRSTVWYX are omitted: none is left to choose");
}

TEST_P(ProteinMpnnTest, IsInvariantUnderMotions) {
  const graph::Context ctx = workspace_->context();
  std::mt19937 rng(2);
  std::fill(input_.known.begin(), input_.known.end(), 1);  // unknown residues stay at the origin
  const MpnnEncoding before = *model_.Encode(ctx, input_);
  const std::array<float, 9> rotation = RandomRotation(&rng);
  input_.xyz = Moved(input_.xyz, rotation, {10, 20, -5});
  const MpnnEncoding after = *model_.Encode(ctx, input_);
  ExpectClose(after.nodes, before.nodes, 1e-4F, "nodes");
}

TEST_P(ProteinMpnnTest, OneResidueIsDesigned) {
  const graph::Context ctx = workspace_->context();
  size_t at = 0;
  while (input_.known[at] == 0) ++at;
  MpnnInput one{.xyz = {input_.xyz.begin() + 12 * at, input_.xyz.begin() + 12 * (at + 1)},
                .known = {1},
                .index = {0},
                .chain = {1},
                .sequence = {input_.sequence[at]},
                .designed = {1}};
  const MpnnEncoding encoding = *model_.Encode(ctx, one);
  EXPECT_EQ(encoding.neighbor, std::vector<int32_t>{0});
  const MpnnSample sample = *model_.Sample(ctx, one, encoding, {.temperature = 1, .seed = 5});
  const std::vector<int32_t> order = {0};
  const std::vector<float> logs = *model_.LogProbabilities(ctx, one, encoding, sample.sequence, order);
  ASSERT_EQ(logs.size(), size_t{kMpnnLetters});
  double total = 0;
  for (const float x : logs) total += std::exp(double{x});
  EXPECT_NEAR(total, 1, 1e-5);
  EXPECT_NEAR(sample.score, -logs[sample.sequence[0]], 1e-4);
  std::mt19937 rng(2);
  MpnnInput moved = one;
  moved.xyz = Moved(one.xyz, RandomRotation(&rng), {10, 20, -5});
  ExpectClose(model_.Encode(ctx, moved)->nodes, encoding.nodes, 1e-4F, "nodes");
  // A shift of all atoms changes nothing: gradients of an axis add up to 0.
  std::vector<float> seed(kMpnnLetters), xyz_grad(one.xyz.size());
  seed[3] = 1;
  ASSERT_TRUE(model_.Backward(ctx, one, one.sequence, order, seed.data(), xyz_grad.data(), {}).ok());
  float largest = 0;
  for (const float g : xyz_grad) largest = std::max(largest, std::abs(g));
  EXPECT_GT(largest, 0);
  for (int axis = 0; axis < 3; ++axis) {
    float sum = 0;
    for (int atom = 0; atom < kBackboneAtoms; ++atom) sum += xyz_grad[3 * atom + axis];
    EXPECT_NEAR(sum, 0, 1e-4F * largest) << axis;
  }
  // An unknown residue keeps its letter.
  one.known = {0};
  const MpnnSample kept = *model_.Sample(ctx, one, *model_.Encode(ctx, one), {});
  EXPECT_EQ(kept.sequence, one.sequence);
  EXPECT_EQ(kept.score, 0);
}

// An edge with the mask 0 has no effect on nodes: results are those of a graph without edges.
TEST_P(ProteinMpnnTest, LayersRunWithoutEdgesAndWithoutNodes) {
  const graph::Context ctx = workspace_->context();
  const WeightMap weights = goldens_.Weights("weights.");
  const WeightScope scope(weights);
  const std::vector<float> nodes = goldens_.Floats("nodes"), edges = goldens_.Floats("edges");
  const int64_t count = goldens_.Shape("nodes")[0];
  const int32_t src[] = {0}, dst[] = {1};
  const graph::Graph one_edge =
      *graph::Graph::FromCoo(graph::Indices::Of(src, 1), graph::Indices::Of(dst, 1), count, count);
  const graph::Graph edgeless = *graph::Graph::FromCoo({}, {}, count, count);
  const graph::Graph empty = *graph::Graph::FromCoo({}, {}, 0, 0);
  const float mask[] = {0};
  for (const std::string name : {"encoder_layers.0", "decoder_layers.0"}) {
    const auto layer = *MpnnLayer::Load(scope.Under(name));
    const std::vector<float> sources(count * layer.source_inputs(), 0.5F);
    const MpnnLayerInputs masked = {.nodes = nodes.data(),
                                    .src = layer.encoder() ? nullptr : sources.data(),
                                    .edge = edges.data(),
                                    .edge_mask = mask};
    std::vector<float> want(nodes.size()), got(nodes.size()), edge_out(layer.hidden()),
        want_grad(nodes.size()), got_grad(nodes.size());
    ASSERT_TRUE(layer.Run(ctx, one_edge, masked, want.data(), edge_out.data()).ok());
    ASSERT_TRUE(layer.Run(ctx, edgeless, {.nodes = nodes.data()}, got.data(), nullptr).ok());
    EXPECT_EQ(got, want) << name;
    ASSERT_TRUE(
        layer.Backward(ctx, one_edge, masked, {.nodes_out = nodes.data(), .nodes = want_grad.data()}, {})
            .ok());
    ASSERT_TRUE(layer
                    .Backward(ctx, edgeless, {.nodes = nodes.data()},
                              {.nodes_out = nodes.data(), .nodes = got_grad.data()}, {})
                    .ok());
    EXPECT_EQ(got_grad, want_grad) << name;
    EXPECT_TRUE(layer.Run(ctx, empty, {}, nullptr, nullptr).ok());
    EXPECT_TRUE(layer.Backward(ctx, empty, {}, {}, {}).ok());
  }
}

TEST_P(ProteinMpnnTest, RandomWeightsLoadAndShapesAreChecked) {
  EXPECT_TRUE(ProteinMpnn::Load(ProteinMpnn::RandomWeights(1, 32, 1), 8).ok());
  WeightMap weights = ProteinMpnn::RandomWeights(1, 32, 1);
  weights["W_out.weight"].shape = {20, 32};
  EXPECT_EQ(moesaic::Message(ProteinMpnn::Load(weights, 8).status()),
            "tensor \"W_out.weight\" must have the shape [21, 32], but has [20, 32]");
  EXPECT_FALSE(ProteinMpnn::Load({}, 8).ok());
  const graph::Context ctx = workspace_->context();
  MpnnInput broken = input_;
  broken.chain.pop_back();
  EXPECT_EQ(moesaic::Message(model_.Encode(ctx, broken).status()),
            "all arrays of the input must have 44 positions");
  broken = input_;
  broken.xyz[12 * 3 + 4] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(moesaic::Message(model_.Encode(ctx, broken).status()),
            "coordinate 4 of residue 3 must be finite, but is nan");
  const MpnnEncoding encoding = *model_.Encode(ctx, input_);
  for (const int32_t letter : {-1, kMpnnLetters}) {
    broken = input_;
    broken.sequence[2] = letter;
    broken.designed[2] = 0;
    EXPECT_EQ(moesaic::Message(model_.Sample(ctx, broken, encoding, {}).status()),
              fmt::format("sequence[2] must be in [0, 21), but is {}", letter));
  }
  broken = input_;
  broken.index[0] = std::numeric_limits<int32_t>::max();
  broken.index[1] = std::numeric_limits<int32_t>::min();
  EXPECT_TRUE(model_.Encode(ctx, broken).ok());
}

}  // namespace
}  // namespace moesaic::science
