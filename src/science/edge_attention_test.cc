// Attention over edges and its gradients against plain loops in double.
#include "science/edge_attention.h"

#include <gtest/gtest.h>

#include "science/test_graphs.h"

namespace moesaic::graph {
namespace {

struct AttentionInputs {
  TestEdges edges;
  int heads = 1, dim = 1, v_dim = 1;
  Target k_target = Target::kSource, v_target = Target::kSource;
  std::vector<double> q, k, v, bias;
};

std::vector<double> Attend(const AttentionInputs& in, double scale) {
  const int64_t qc = int64_t{in.heads} * in.dim, vc = int64_t{in.heads} * in.v_dim;
  std::vector<double> out(in.edges.num_dst * vc, 0);
  for (int64_t d = 0; d < in.edges.num_dst; ++d) {
    for (int h = 0; h < in.heads; ++h) {
      double total = 0;
      for (int64_t e = 0; e < in.edges.size(); ++e) {
        if (in.edges.dst[e] != d) continue;
        const int64_t k = in.k_target == Target::kEdge ? e : in.edges.src[e];
        const int64_t v = in.v_target == Target::kEdge ? e : in.edges.src[e];
        double score = 0;
        for (int i = 0; i < in.dim; ++i)
          score += in.q[d * qc + h * in.dim + i] * in.k[k * qc + h * in.dim + i];
        const double weight = std::exp(scale * score + in.bias[e * in.heads + h]);
        total += weight;
        for (int i = 0; i < in.v_dim; ++i)
          out[d * vc + h * in.v_dim + i] += weight * in.v[v * vc + h * in.v_dim + i];
      }
      for (int i = 0; i < in.v_dim && total > 0; ++i) out[d * vc + h * in.v_dim + i] /= total;
    }
  }
  return out;
}

std::vector<double> Flat(const TestFeatures& x) {
  std::vector<double> values;
  for (int64_t r = 0; r < x.rows(); ++r) {
    for (int64_t c = 0; c < x.cols(); ++c) values.push_back(x.at(r, c));
  }
  return values;
}

class EdgeAttentionTest : public testing::TestWithParam<runtime::Isa> {
 protected:
  std::unique_ptr<Workspace> workspace_ = MakeWorkspace(GetParam(), 2);
  std::mt19937 rng_{5};
};
INSTANTIATE_TEST_SUITE_P(Isa, EdgeAttentionTest, testing::ValuesIn(GraphIsas()),
                         [](const auto& info) { return runtime::IsaName(info.param); });

double Norm(const std::vector<double>& x) {
  double sum = 0;
  for (const double value : x) sum += value * value;
  return std::sqrt(sum);
}

TEST_P(EdgeAttentionTest, ForwardAndGradientsMatchDouble) {
  const Context ctx = workspace_->context();
  for (const auto& [target, dtype] :
       std::vector<std::pair<Target, tensor::DType>>{{Target::kSource, tensor::DType::kF32},
                                                     {Target::kEdge, tensor::DType::kF32},
                                                     {Target::kSource, tensor::DType::kBF16},
                                                     {Target::kEdge, tensor::DType::kF16}}) {
    for (const auto& [heads, dim, v_dim, num_edges] :
         std::vector<std::array<int, 4>>{{1, 1, 1, 40}, {4, 8, 5, 60}, {2, 20, 33, 900}}) {
      AttentionInputs in{.edges = RandomEdges(&rng_, 9, 7, num_edges),
                         .heads = heads,
                         .dim = dim,
                         .v_dim = v_dim,
                         .k_target = target,
                         .v_target = target,
                         .q = {},
                         .k = {},
                         .v = {},
                         .bias = {}};
      const Graph graph = in.edges.Build();
      const int64_t owners = target == Target::kEdge ? num_edges : 9;
      auto random = [&, dtype = dtype](int64_t rows, int64_t cols) {
        return TestFeatures::Random(&rng_, dtype, rows, cols);
      };
      const TestFeatures q = random(7, int64_t{heads} * dim), k = random(owners, int64_t{heads} * dim),
                         v = random(owners, int64_t{heads} * v_dim), bias = random(num_edges, heads),
                         grad = random(7, int64_t{heads} * v_dim);
      TestFeatures out(dtype, 7, int64_t{heads} * v_dim);
      const float scale = 0.3F;
      const EdgeAttentionParams params = {.heads = heads,
                                          .q = q.view(),
                                          .k = k.view(),
                                          .v = v.view(),
                                          .bias = bias.view(),
                                          .k_target = target,
                                          .v_target = target,
                                          .scale = scale,
                                          .out = out.out()};
      ASSERT_TRUE(EdgeAttention(ctx, graph, params).ok());
      in.q = Flat(q);
      in.k = Flat(k);
      in.v = Flat(v);
      in.bias = Flat(bias);
      const std::vector<double> want = Attend(in, scale), got = Flat(out), weights = Flat(grad);
      for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-5 + 2 * Unit(dtype)) << i;

      TestFeatures grads[] = {{dtype, q.rows(), q.cols()},
                              {dtype, k.rows(), k.cols()},
                              {dtype, v.rows(), v.cols()},
                              {dtype, bias.rows(), bias.cols()}};
      ASSERT_TRUE(EdgeAttentionBackward(ctx, graph, params,
                                        {.out_grad = grad.view(),
                                         .q_grad = grads[0].out(),
                                         .k_grad = grads[1].out(),
                                         .v_grad = grads[2].out(),
                                         .bias_grad = grads[3].out()})
                      .ok());
      std::vector<double>* inputs[] = {&in.q, &in.k, &in.v, &in.bias};
      for (int which = 0; which < 4; ++which) {
        const std::vector<double> direction = Flat(random(grads[which].rows(), grads[which].cols()));
        const std::vector<double> kept = *inputs[which];
        auto loss = [&](double step) {
          for (size_t i = 0; i < kept.size(); ++i) (*inputs[which])[i] = kept[i] + step * direction[i];
          const std::vector<double> result = Attend(in, scale);
          double sum = 0;
          for (size_t i = 0; i < result.size(); ++i) sum += result[i] * weights[i];
          return sum;
        };
        const double difference = (loss(1e-5) - loss(-1e-5)) / 2e-5;
        *inputs[which] = kept;
        double product = 0;
        const std::vector<double> computed = Flat(grads[which]);
        for (size_t i = 0; i < kept.size(); ++i) product += computed[i] * direction[i];
        // The gradient, and the factors of its sums, are rounded to the type.
        const double rounding = 4 * Unit(dtype) * Norm(computed) * Norm(direction);
        EXPECT_NEAR(product, difference, 1e-3 * std::max(1.0, std::abs(difference)) + rounding)
            << "input " << which;
      }
    }
  }
}

// Scores of some 30 differ by less than the spacing of 16-bit floats: weights must come from f32 scores.
TEST_P(EdgeAttentionTest, GradientsUseF32Scores) {
  const Context ctx = workspace_->context();
  constexpr int kEdges = 12, kDim = 16;
  std::vector<int32_t> src(kEdges), dst(kEdges, 0);
  for (int e = 0; e < kEdges; ++e) src[e] = e;
  const Graph graph =
      *Graph::FromCoo(Indices::Of(src.data(), kEdges), Indices::Of(dst.data(), kEdges), kEdges, 1);
  for (const tensor::DType dtype : {tensor::DType::kBF16, tensor::DType::kF16}) {
    TestFeatures q = TestFeatures::Random(&rng_, dtype, 1, kDim), k(dtype, kEdges, kDim),
                 v = TestFeatures::Random(&rng_, dtype, kEdges, kDim), grad(dtype, 1, kDim),
                 out(dtype, 1, kDim), v_grad(dtype, kEdges, kDim);
    std::uniform_real_distribution<float> noise(-0.05F, 0.05F);
    for (int c = 0; c < kDim; ++c) {
      grad.Set(0, c, 1);
      for (int e = 0; e < kEdges; ++e) k.Set(e, c, q.at(0, c) + noise(rng_));
    }
    const EdgeAttentionParams params = {
        .q = q.view(), .k = k.view(), .v = v.view(), .bias = {}, .scale = 1.3F, .out = out.out()};
    ASSERT_TRUE(
        EdgeAttentionBackward(ctx, graph, params, {.out_grad = grad.view(), .v_grad = v_grad.out()}).ok());
    std::vector<double> weights(kEdges);
    double total = 0;
    for (int e = 0; e < kEdges; ++e) {
      double score = 0;
      for (int c = 0; c < kDim; ++c) score += 1.3F * double{q.at(0, c)} * k.at(e, c);
      total += weights[e] = std::exp(score - 30);
    }
    for (int e = 0; e < kEdges; ++e) {
      const double want = weights[e] / total;
      // Rounded as a factor and as a result; a score has an error of some 16 * 30 * 2^-24.
      EXPECT_NEAR(v_grad.at(e, 3), want, (Unit(dtype) + 1e-4) * want) << e;
    }
  }
}

TEST_P(EdgeAttentionTest, LargeScoresDoNotOverflow) {
  const std::vector<int32_t> src = {0, 1}, dst = {0, 0};
  const Graph graph = *Graph::FromCoo(Indices::Of(src.data(), 2), Indices::Of(dst.data(), 2), 2, 2);
  TestFeatures q(tensor::DType::kF32, 2, 1), k(tensor::DType::kF32, 2, 1), v(tensor::DType::kF32, 2, 1),
      out(tensor::DType::kF32, 2, 1);
  q.Fill(1e4F);
  k.Set(0, 0, 1);
  k.Set(1, 0, -1);
  v.Set(0, 0, 3);
  v.Set(1, 0, 8);
  std::vector<float> log_sum(2);
  ASSERT_TRUE(
      EdgeAttention(
          workspace_->context(), graph,
          {.q = q.view(), .k = k.view(), .v = v.view(), .bias = {}, .out = out.out(), .log_sum = log_sum})
          .ok());
  EXPECT_EQ(out.at(0, 0), 3);
  EXPECT_EQ(out.at(1, 0), 0);  // no edges
  EXPECT_EQ(log_sum[0], 1e4F);
  EXPECT_EQ(log_sum[1], -std::numeric_limits<float>::infinity());
}

// Node 0 has its first and last edges masked, node 1 all of them, node 2 none; more edges than the kernels
// keep scores of at once.
TEST_P(EdgeAttentionTest, MaskedEdgesHaveNoWeight) {
  constexpr float kMasked = -std::numeric_limits<float>::infinity();
  const Context ctx = workspace_->context();
  constexpr int kEdges = 400, kHeads = 2, kDim = 3;
  std::vector<int32_t> src, dst;
  for (int e = 0; e < 3 * kEdges; ++e) {
    src.push_back(e % 7);
    dst.push_back(e / kEdges);
  }
  const Graph graph =
      *Graph::FromCoo(Indices::Of(src.data(), 3 * kEdges), Indices::Of(dst.data(), 3 * kEdges), 7, 3);
  for (const tensor::DType dtype : {tensor::DType::kF32, tensor::DType::kBF16, tensor::DType::kF16}) {
    auto random = [&](int64_t rows, int64_t cols) { return TestFeatures::Random(&rng_, dtype, rows, cols); };
    const TestFeatures q = random(3, kHeads * kDim), k = random(7, kHeads * kDim),
                       v = random(7, kHeads * kDim), grad = random(3, kHeads * kDim);
    TestFeatures bias = random(3 * kEdges, kHeads), out(dtype, 3, kHeads * kDim);
    for (int e = 0; e < 2 * kEdges; ++e) {
      const bool masked = e >= kEdges || e < 300 || e > 350;
      for (int h = 0; h < kHeads && masked; ++h) bias.Set(e, h, kMasked);
    }
    AttentionInputs in{.edges = {.num_src = 7, .num_dst = 3, .src = src, .dst = dst},
                       .heads = kHeads,
                       .dim = kDim,
                       .v_dim = kDim,
                       .q = Flat(q),
                       .k = Flat(k),
                       .v = Flat(v),
                       .bias = Flat(bias)};
    std::vector<float> log_sum(3 * kHeads);
    const EdgeAttentionParams params = {.heads = kHeads,
                                        .q = q.view(),
                                        .k = k.view(),
                                        .v = v.view(),
                                        .bias = bias.view(),
                                        .scale = 0.5F,
                                        .out = out.out(),
                                        .log_sum = log_sum};
    ASSERT_TRUE(EdgeAttention(ctx, graph, params).ok());
    const std::vector<double> want = Attend(in, 0.5), got = Flat(out);
    // A weighted mean of values of at most 2, rounded once.
    for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-5 + 2 * Unit(dtype)) << i;
    for (int h = 0; h < kHeads; ++h) {
      EXPECT_EQ(log_sum[kHeads + h], kMasked);
      EXPECT_TRUE(std::isfinite(log_sum[h]));
    }
    TestFeatures q_grad(dtype, 3, kHeads * kDim), bias_grad(dtype, 3 * kEdges, kHeads);
    ASSERT_TRUE(EdgeAttentionBackward(ctx, graph, params,
                                      {.out_grad = grad.view(),
                                       .q_grad = q_grad.out(),
                                       .k_grad = {},
                                       .v_grad = {},
                                       .bias_grad = bias_grad.out()})
                    .ok());
    for (int c = 0; c < kHeads * kDim; ++c) {
      EXPECT_EQ(q_grad.at(1, c), 0);
      EXPECT_NE(q_grad.at(0, c), 0);
    }
    for (int e = 0; e < 2 * kEdges; ++e) {
      if (std::isinf(bias.at(e, 0))) {
        ASSERT_EQ(bias_grad.at(e, 0), 0) << e;
      }
    }
  }
}

}  // namespace
}  // namespace moesaic::graph
