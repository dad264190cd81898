// Harmonics, Wigner symbols and SE(3) layers against e3nn and PyTorch transcriptions.
#include "science/se3/se3_layers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "science/test_goldens.h"

namespace moesaic::science {
namespace {

const Fiber kIn = {{0, 5}, {1, 3}}, kOut = {{0, 8}, {1, 8}, {2, 4}};
constexpr int kSe3Nodes = 12;

TEST(So3Test, WignerSymbolsMatchE3nn) {
  const Goldens goldens("se3");
  for (const auto& [a, b, c] : std::vector<std::array<int, 3>>{
           {0, 1, 1}, {1, 1, 0}, {1, 1, 1}, {1, 1, 2}, {1, 2, 2}, {2, 2, 3}, {3, 2, 4}, {4, 4, 4}}) {
    const std::string name = fmt::format("w3j.{}{}{}", a, b, c);
    const std::vector<double> got = Wigner3j(a, b, c);
    ExpectClose({got.begin(), got.end()}, goldens.Floats(name), 1e-6F, name.c_str());
  }
  for (const double x : Wigner3j(1, 1, 3)) EXPECT_EQ(x, 0);
}

TEST(So3Test, HarmonicsMatchE3nn) {
  const Goldens goldens("se3");
  const std::vector<float> directions = goldens.Floats("directions");
  const SphericalHarmonics harmonics(6);
  std::vector<float> got(directions.size() / 3 * harmonics.size());
  for (size_t i = 0; i < directions.size() / 3; ++i)
    harmonics.Evaluate(directions.data() + 3 * i, got.data() + i * harmonics.size());
  ExpectClose(got, goldens.Floats("harmonics"), 1e-6F, "harmonics");
  std::vector<float> zero(harmonics.size());
  const float origin[3] = {0, 0, 0};
  harmonics.Evaluate(origin, zero.data());
  for (size_t i = 1; i < zero.size(); ++i) EXPECT_EQ(zero[i], 0);
}

class Se3LayersTest : public testing::TestWithParam<runtime::Isa> {
 protected:
  Se3Graph GraphOf(const std::vector<float>& xyz) const {
    const std::vector<int32_t> src = goldens_.Ints("src"), dst = goldens_.Ints("dst");
    const auto edges = static_cast<int64_t>(src.size());
    return *Se3Graph::Create(
        *graph::Graph::FromCoo(graph::Indices::Of(src.data(), edges), graph::Indices::Of(dst.data(), edges),
                               kSe3Nodes, kSe3Nodes),
        xyz.data(), 2);
  }
  Goldens goldens_{"se3"};
  std::unique_ptr<graph::Workspace> workspace_ = graph::MakeWorkspace(GetParam(), 2);
  graph::Context ctx_ = workspace_->context();
  FiberFeatures x_ = {{0, goldens_.Floats("x0")}, {1, goldens_.Floats("x1")}};
  std::vector<float> edge_ = goldens_.Floats("edge"), xyz_ = goldens_.Floats("xyz");
  WeightMap conv_ = goldens_.Weights("conv.weights."), attention_ = goldens_.Weights("attention.weights.");
};
INSTANTIATE_TEST_SUITE_P(Isa, Se3LayersTest, testing::ValuesIn(graph::GraphIsas()),
                         [](const auto& info) { return runtime::IsaName(info.param); });

TEST_P(Se3LayersTest, LayersMatchPyTorch) {
  const Se3Graph edges = GraphOf(xyz_);
  const FiberFeatures conv =
      *Se3Conv::Load(WeightScope(conv_), kIn, kOut, 3)->RunNodes(ctx_, edges, x_, edge_.data());
  const FiberFeatures attention = *Se3AttentionBlock::Load(WeightScope(attention_), kIn, kOut, 3, 2, 2)
                                       ->Run(ctx_, edges, x_, edge_.data());
  for (const auto& [degree, channels] : kOut) {
    ExpectClose(conv.at(degree), goldens_.Floats(fmt::format("conv.out{}", degree)), 1e-5F, "conv");
    ExpectClose(attention.at(degree), goldens_.Floats(fmt::format("attention.out{}", degree)), 1e-5F,
                "attention");
  }
  const WeightMap norm = goldens_.Weights("norm.weights.");
  const FiberFeatures scaled = *Se3Norm::Load(WeightScope(norm), kIn)->Run(ctx_, kSe3Nodes, x_);
  for (const int degree : {0, 1})
    ExpectClose(scaled.at(degree), goldens_.Floats(fmt::format("norm.out{}", degree)), 1e-5F, "norm");
}

// Rotates rows of degree 2: the matrix D with Y(R x) = D Y(x) for harmonics Y of 5 directions x.
std::vector<float> TurnedDegree2(const std::vector<float>& rows, const std::array<float, 9>& rotation,
                                 std::mt19937* rng) {
  constexpr int kSize = 5;
  const SphericalHarmonics harmonics(2);
  std::normal_distribution<float> normal;
  std::vector<float> directions(3 * kSize);
  for (float& x : directions) x = normal(*rng);
  const std::vector<float> turned = Moved(directions, rotation, {0, 0, 0});
  double a[kSize][2 * kSize];  // rows [Y(x), Y(R x)]: A X = B with X = D^T
  for (int i = 0; i < kSize; ++i) {
    std::vector<float> before(harmonics.size()), after(harmonics.size());
    harmonics.Evaluate(directions.data() + 3 * i, before.data());
    harmonics.Evaluate(turned.data() + 3 * i, after.data());
    for (int m = 0; m < kSize; ++m) {
      a[i][m] = before[SphericalHarmonics::Offset(2) + m];
      a[i][kSize + m] = after[SphericalHarmonics::Offset(2) + m];
    }
  }
  for (int column = 0; column < kSize; ++column) {
    int pivot = column;
    for (int i = column; i < kSize; ++i)
      pivot = std::abs(a[i][column]) > std::abs(a[pivot][column]) ? i : pivot;
    std::swap(a[column], a[pivot]);
    for (int i = 0; i < kSize; ++i) {
      const double factor = i == column ? 0 : a[i][column] / a[column][column];
      for (int c = 0; c < 2 * kSize; ++c) a[i][c] -= factor * a[column][c];
    }
    for (int c = 2 * kSize; c-- > 0;) a[column][c] /= a[column][column];
  }
  std::vector<float> out(rows.size());
  for (size_t r = 0; r < rows.size(); r += kSize) {
    for (int m = 0; m < kSize; ++m) {
      for (int k = 0; k < kSize; ++k) out[r + m] += static_cast<float>(a[k][kSize + m]) * rows[r + k];
    }
  }
  return out;
}

TEST_P(Se3LayersTest, AttentionIsEquivariantAndIndependentOfThreads) {
  const auto block = *Se3AttentionBlock::Load(WeightScope(attention_), kIn, kOut, 3, 2, 2);
  const FiberFeatures before = *block.Run(ctx_, GraphOf(xyz_), x_, edge_.data());
  std::mt19937 rng(4);
  const std::array<float, 9> rotation = RandomRotation(&rng);
  FiberFeatures turned = x_;
  turned[1] = Moved(x_[1], rotation, {0, 0, 0});  // features of degree 1 are vectors
  const FiberFeatures after =
      *block.Run(ctx_, GraphOf(Moved(xyz_, rotation, {1, 2, 3})), turned, edge_.data());
  ExpectClose(after.at(0), before.at(0), 1e-4F, "degree 0");
  ExpectClose(after.at(1), Moved(before.at(1), rotation, {0, 0, 0}), 1e-4F, "degree 1");
  // The matrix is solved from harmonics in f32.
  ExpectClose(after.at(2), TurnedDegree2(before.at(2), rotation, &rng), 1e-4F, "degree 2");
  const auto other = graph::MakeWorkspace(GetParam(), 3);
  EXPECT_EQ(*block.Run(other->context(), GraphOf(xyz_), x_, edge_.data()), before);
}

// Without edges nothing is attended to: the result is the projection of own features, and of zeros.
TEST_P(Se3LayersTest, LayersRunWithoutEdgesAndWithoutNodes) {
  const auto block = *Se3AttentionBlock::Load(WeightScope(attention_), kIn, kOut, 3, 2, 2);
  const auto conv = *Se3Conv::Load(WeightScope(conv_), kIn, kOut, 3);
  const Se3Graph edgeless =
      *Se3Graph::Create(*graph::Graph::FromCoo({}, {}, kSe3Nodes, kSe3Nodes), xyz_.data(), 2);
  const FiberFeatures attended = *block.Run(ctx_, edgeless, x_, nullptr),
                      sums = *conv.RunNodes(ctx_, edgeless, x_, nullptr);
  FiberFeatures seed, x_grad = x_, want_grad = x_;
  Se3Gradients grads;
  for (auto& [degree, values] : x_grad) {
    std::fill(values.begin(), values.end(), 0.0F);
    std::fill(want_grad[degree].begin(), want_grad[degree].end(), 0.0F);
    grads.nodes[degree] = values.data();
  }
  for (const auto& [degree, channels] : kOut) {
    const int64_t dim = 2 * degree + 1, n = channels;
    const WeightTensor& weight = attention_.at(fmt::format("project.weights.{}", degree));
    const int64_t own = kIn.contains(degree) ? kIn.at(degree) : 0, k = weight.shape[1];
    std::vector<float> want(kSe3Nodes * n * dim);
    seed[degree].resize(want.size());
    for (size_t i = 0; i < want.size(); ++i) seed[degree][i] = std::cos(static_cast<float>(i));
    for (int64_t row = 0; row < kSe3Nodes; ++row) {
      for (int64_t o = 0; o < n; ++o) {
        for (int64_t c = 0; c < own; ++c) {
          for (int64_t m = 0; m < dim; ++m) {
            const int64_t from = (row * own + c) * dim + m, to = (row * n + o) * dim + m;
            want[to] += weight.values[o * k + c] * x_[degree][from];
            want_grad[degree][from] += weight.values[o * k + c] * seed[degree][to];
          }
        }
      }
    }
    ExpectClose(attended.at(degree), want, 1e-5F, "attention");
    EXPECT_EQ(sums.at(degree), std::vector<float>(want.size())) << degree;
  }
  std::vector<float> xyz_grad(xyz_.size());
  grads.xyz = xyz_grad.data();
  ASSERT_TRUE(block.Backward(ctx_, edgeless, x_, nullptr, seed, grads, {}).ok());
  for (const auto& [degree, want] : want_grad) ExpectClose(x_grad.at(degree), want, 1e-5F, "gradient");
  EXPECT_EQ(xyz_grad, std::vector<float>(xyz_.size()));

  const Se3Graph empty = *Se3Graph::Create(*graph::Graph::FromCoo({}, {}, 0, 0), nullptr, 2);
  const FiberFeatures none = {{0, {}}, {1, {}}}, no_rows = {{0, {}}, {1, {}}, {2, {}}};
  EXPECT_EQ(*block.Run(ctx_, empty, none, nullptr), no_rows);
  EXPECT_EQ(*conv.RunNodes(ctx_, empty, none, nullptr), no_rows);
}

TEST_P(Se3LayersTest, WrongShapesAreNamed) {
  EXPECT_EQ(moesaic::Message(Se3Conv::Load(WeightScope(conv_), kIn, kOut, 4).status()),
            "tensor \"conv.0,0.radial_func.net.0.weight\" must have the shape [-1, 5], but has [32, 4]");
  FiberFeatures wrong = x_;
  wrong[1].pop_back();
  EXPECT_EQ(moesaic::Message(Se3Conv::Load(WeightScope(conv_), kIn, kOut, 3)
                                 ->RunNodes(ctx_, GraphOf(xyz_), wrong, edge_.data())
                                 .status()),
            "features of degree 1 must have 108 elements, but have 107");
}

}  // namespace
}  // namespace moesaic::science
