// Tests the parts of carving on data with a known answer.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <numeric>
#include <random>

#include "carve/balanced_clusters.h"
#include "carve/router_fit.h"
#include "carve/slice_assignment.h"
#include "kernels/exec_context.h"
#include "kernels/kernel_table.h"
#include "runtime/cpu_features.h"

namespace moesaic::carve {
namespace {

class PartsTest : public testing::Test {
 protected:
  RowMatrix Random(int rows, int columns) {
    RowMatrix values(rows, columns);
    for (int64_t i = 0; i < values.size(); ++i) values.data()[i] = normal_(random_);
    return values;
  }
  static Rows AllRows(const RowMatrix& m) {
    return {m.data(), m.cols(), static_cast<int>(m.rows()), static_cast<int>(m.cols())};
  }

  std::mt19937 random_{7};
  std::normal_distribution<float> normal_;
  kernels::KernelTable kernels_ = kernels::SelectKernels(runtime::DetectCpu());
  std::unique_ptr<runtime::ThreadPool> pool_ = *runtime::ThreadPool::Create({.threads = 2, .pin = false});
  runtime::Arena scratch_;
  kernels::ExecContext ctx_{.kernels = &kernels_, .pool = pool_.get(), .scratch = &scratch_};
};

TEST_F(PartsTest, AddProductsSumsWeightedProductsOverTokens) {
  const RowMatrix a = Random(1500, 24), b = Random(1500, 10);
  std::vector<float> weight(1500);
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = static_cast<float>(i % 5);
  RowMatrix sum = RowMatrix::Ones(24, 10);
  AddProducts(ctx_, AllRows(a), AllRows(b), weight, &sum);
  const Eigen::Map<const Eigen::VectorXf> w(weight.data(), 1500);
  const RowMatrix expected = (a.transpose() * w.asDiagonal() * b).array() + 1;
  // Both factors are rounded to bf16. Each error is uniform up to 2^-8, so a product's relative error is
  // sqrt(2/3) 2^-8 = 0.0032. A sum of 1,500 products of root mean square 2.4 (the weights') has an error of
  // about 0.0032 * 2.4 * sqrt(1500) = 0.3. The largest of 240 is below four times that.
  EXPECT_LT((sum - expected).cwiseAbs().maxCoeff(), 1.2F);
}

TEST_F(PartsTest, SolveRidgeRecoversALinearMap) {
  const RowMatrix x = Random(400, 12), map = Random(12, 5);
  const RowMatrix gram = x.transpose() * x, right = gram * map;
  const auto found = SolveRidge(*pool_, gram, right, 1e-6F);
  ASSERT_TRUE(found.ok());
  EXPECT_LT((*found - map).cwiseAbs().maxCoeff(), 1e-4F);  // condition ~ 4, f32
  // A ridge as large as the gram itself about halves the map.
  const auto pulled = SolveRidge(*pool_, gram, right, 1.0F);
  ASSERT_TRUE(pulled.ok());
  EXPECT_NEAR(pulled->norm() / map.norm(), 0.5, 0.1);
}

TEST_F(PartsTest, SolveRidgeRejectsNonFiniteInput) {
  RowMatrix gram = RowMatrix::Identity(4, 4);
  gram(1, 1) = std::nanf("");
  EXPECT_FALSE(SolveRidge(*pool_, gram, RowMatrix::Ones(4, 1), 0.1F).ok());
}

TEST_F(PartsTest, BalancedClustersRecoversPlantedClustersOfEqualSize) {
  const RowMatrix centers = Random(4, 64);
  RowMatrix features(32, 64);
  for (int i = 0; i < 32; ++i) features.row(i) = 3 * centers.row(i % 4) + 0.3F * Random(1, 64);
  // Centers start at items 0, 8, 16, 24. The pattern is shifted there so that they start in different
  // clusters.
  for (int i = 8; i < 32; i += 8) features.row(i).swap(features.row(i + i / 8));
  const std::vector<int> found = BalancedClusters(*pool_, features, 4, 10);
  std::vector<int> sizes(4, 0);
  for (const int c : found) ++sizes[c];
  EXPECT_EQ(sizes, std::vector<int>(4, 8));
  for (int i = 0; i < 32; ++i) {
    for (int j = 0; j < i; ++j) {
      const bool alike = features.row(i).normalized().dot(features.row(j).normalized()) > 0.7F;
      EXPECT_EQ(found[i] == found[j], alike) << i << " " << j;
    }
  }
  EXPECT_EQ(BalancedClusters(*pool_, features, 4, 10), found);
}

TEST_F(PartsTest, ImproveSlicesNeverRaisesTheCostAndKeepsSizes) {
  const int tokens = 200, routed = 4, room = 6, shared = 6, neurons = shared + routed * room;
  RowMatrix energy = Random(tokens, neurons).array().square();
  std::vector<int> expert_of(neurons);
  for (int j = 0; j < neurons; ++j) expert_of[j] = j < shared ? -1 : (j - shared) % routed;
  std::vector<std::vector<int>> off(tokens);
  for (int t = 0; t < tokens; ++t) off[t] = {t % routed};
  // Neuron 10 matters only to the tokens that leave expert 1 out.
  for (int t = 0; t < tokens; ++t) energy(t, 10) = t % routed == 1 ? 50.0F : 0.0F;
  expert_of[10] = 1;
  expert_of[7] = 0;
  const auto cost = [&](const std::vector<int>& of) {
    double sum = 0;
    for (int t = 0; t < tokens; ++t) {
      for (int j = 0; j < neurons; ++j) sum += of[j] == off[t][0] ? energy(t, j) : 0;
    }
    return sum;
  };
  const std::vector<int> improved =
      ImproveSlices(energy, std::vector<float>(tokens, 1.0F), off, routed, expert_of);
  EXPECT_LT(cost(improved), cost(expert_of) - 50.0 * tokens / routed / 2);
  EXPECT_NE(improved[10], 1);
  for (int e = -1; e < routed; ++e) {
    EXPECT_EQ(std::count(improved.begin(), improved.end(), e),
              std::count(expert_of.begin(), expert_of.end(), e));
  }
}

TEST_F(PartsTest, RegressedRouterLeavesOutTheCheapestExperts) {
  // An expert's cost is the exponential of a linear function of the input, so regression alone finds it.
  const int tokens = 2000, hidden = 16, routed = 8, active = 5;
  const RowMatrix x = Random(tokens, hidden), map = Random(hidden, routed);
  const RowMatrix costs = (x * map).array().exp();
  const auto fit = RouterFit::Create(ctx_, AllRows(x));
  ASSERT_TRUE(fit.ok());
  const LinearRouter router = fit->Fit(costs, std::vector<float>(tokens, 1.0F), active, 0);
  int wrong = 0;
  for (int t = 0; t < tokens; ++t) {
    for (const int e : router.Off(x.row(t).data(), active)) {
      wrong += (costs.row(t).array() < costs(t, e)).count() >= routed - active;
    }
  }
  EXPECT_LT(wrong, tokens * (routed - active) / 50);
}

TEST_F(PartsTest, GradientStepsLowerTheCostOfInactiveExperts) {
  // The costs are not log-linear: a token's loss depends on |x|.
  const int tokens = 3000, hidden = 16, routed = 8, active = 5;
  const RowMatrix x = Random(tokens, hidden), map = Random(hidden, routed);
  const RowMatrix costs = (x * map).array().max(0.0F).square() + 1e-3F;
  const auto fit = RouterFit::Create(ctx_, AllRows(x));
  ASSERT_TRUE(fit.ok());
  const auto lost = [&](int steps) {
    const LinearRouter router = fit->Fit(costs, std::vector<float>(tokens, 1.0F), active, steps);
    double sum = 0;
    for (int t = 0; t < tokens; ++t) {
      for (const int e : router.Off(x.row(t).data(), active)) sum += costs(t, e);
    }
    return sum;
  };
  EXPECT_LE(lost(30), lost(0));
}

TEST_F(PartsTest, RouterFitRejectsNonFiniteInputs) {
  RowMatrix x = Random(50, 4);
  x(3, 3) = INFINITY;
  EXPECT_FALSE(RouterFit::Create(ctx_, AllRows(x)).ok());
}

}  // namespace
}  // namespace moesaic::carve
