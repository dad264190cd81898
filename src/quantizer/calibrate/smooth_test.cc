#include "quantizer/calibrate/smooth.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "quantizer/calibrate/activation.h"
#include "quantizer/calibrate/folding.h"
#include "quantizer/test_context.h"
#include "tensor/static_scale.h"

namespace moesaic::quantizer {
namespace {

constexpr int kTokens = 200, kInputs = 128, kOutputs = 96;

// Tokens with outlier channels that the weights of the linear compensate, so that the product has none.
struct OutlierLayer {
  explicit OutlierLayer(float outlier)
      : x(TestTokens(kTokens, kInputs, 1, 2)), w(TestWeights(kOutputs, kInputs, 3)), largest(kInputs) {
    for (size_t at = 0; at < x.size(); ++at) x[at] *= at % kInputs % 40 == 7 ? outlier : 1;
    for (size_t at = 0; at < w.size(); ++at) w[at] /= at % kInputs % 40 == 7 ? outlier : 1;
    for (size_t at = 0; at < x.size(); ++at) {
      largest[at % kInputs] = std::max(largest[at % kInputs], std::fabs(x[at]));
    }
  }
  TokenSample tokens() const { return {x.data(), kTokens, kInputs}; }
  WeightRows weights() const { return {w.data(), kOutputs}; }
  std::vector<float> x, w, largest;
};

StatusOr<Smoothing> Search(const TestContext& threads, const OutlierLayer& layer,
                           const SmoothOptions& options) {
  const WeightRows weights = layer.weights();
  return SearchSmoothing(threads.ctx, layer.tokens(), layer.largest, {&weights, 1}, options);
}

TEST(Smooth, ScalesFollowSmoothQuant) {
  const std::vector<float> x = {4, 1, 0, 16}, w = {1, 0.25F, 3, 0};
  const std::vector<float> scales = SmoothScales(x, w, 0.5F, false);
  // sqrt(4 / 1) = 2 and sqrt(1 / .25) = 2, divided by their mean. The other inputs have scale 1.
  EXPECT_THAT(scales, testing::ElementsAre(1, 1, 1, 1));
  const std::vector<float> all_x = SmoothScales(std::vector<float>{4, 1}, std::vector<float>{1, 1}, 1, false);
  EXPECT_THAT(all_x, testing::ElementsAre(2, 0.5F));
  for (const float s :
       SmoothScales(std::vector<float>{5, 0.3F, 1e4F}, std::vector<float>{1, 7, 0.01F}, 0.8F, true)) {
    EXPECT_EQ(std::exp2(std::nearbyint(std::log2(s))), s);
  }
}

TEST(Smooth, SmoothedStaticActivationsAreNearDynamicOnes) {
  const TestContext threads(2);
  const OutlierLayer layer(100);
  const SmoothOptions options{.grid = {GridKind::kInt8Channel, 0}, .static_activations = true};
  for (const bool powers : {false, true}) {
    SmoothOptions with = options;
    with.powers_of_two = powers;
    const auto found = Search(threads, layer, with);
    ASSERT_TRUE(found.ok()) << found.status();
    EXPECT_GT(found->alpha, 0);
    EXPECT_LT(found->loss, 0.02 * found->loss_without);
    SmoothOptions dynamic = with;
    dynamic.static_activations = false;
    const auto by_token = Search(threads, OutlierLayer(1), dynamic);
    // The bound is a layer without outliers and with a scale per token.
    EXPECT_LT(found->loss, (powers ? 8 : 4) * by_token->loss_without);
  }
}

TEST(Smooth, DoesNotSmoothALayerWithoutGain) {
  const TestContext threads(1);
  const OutlierLayer layer(1);
  // Weights with a scale per input group cannot absorb more: either no smoothing, or less loss.
  const auto found =
      Search(threads, layer, {.grid = {GridKind::kInt4Group, 32}, .static_activations = false});
  EXPECT_LE(found->loss, found->loss_without);
  if (found->alpha == 0) {
    EXPECT_THAT(found->scales, testing::Each(1.0F));
  }
}

// norm -> linears: the linears compute the same from the smoothed norm, bit for bit if the scales are powers
// of two.
TEST(Smooth, FoldingKeepsTheFunction) {
  const TestContext threads(2);
  OutlierLayer layer(100);
  const auto found =
      Search(threads, layer,
             {.grid = {GridKind::kInt8Channel, 0}, .static_activations = true, .powers_of_two = true});
  std::vector<float> norm(kInputs, 1.5F), x = layer.x;
  for (size_t at = 0; at < x.size(); ++at) x[at] /= 1.5F;  // values before the norm's weight
  const auto normed = [&] {
    std::vector<float> y = x;
    for (size_t at = 0; at < y.size(); ++at) y[at] *= norm[at % kInputs];
    return y;
  };
  const std::vector<float> first = normed();
  const std::vector<float> exact = Outputs(threads.ctx, {first.data(), kTokens, kInputs}, layer.weights());
  Folding folding;
  folding.Add("model.layers.0.input_layernorm", found->scales);
  folding.Apply(threads.ctx, "model.layers.0.input_layernorm.weight", 0, 1, kInputs, norm.data());
  folding.Apply(threads.ctx, "model.layers.0.self_attn.q_proj", 0, kOutputs, kInputs, layer.w.data());
  const std::vector<float> second = normed();
  EXPECT_EQ(Outputs(threads.ctx, {second.data(), kTokens, kInputs}, layer.weights()), exact);
}

// up -> down of an expert: silu(gate) * (up / s) times down * s.
TEST(Smooth, FoldingUpAndDownKeepsTheFunction) {
  const TestContext threads(2);
  const int hidden = 64, width = 48, tokens = 30;
  std::vector<float> up = TestWeights(width, hidden, 4), down = TestWeights(hidden, width, 5);
  const std::vector<float> gate = TestWeights(width, hidden, 6), x = TestTokens(tokens, hidden, 1, 7);
  const auto run = [&] {
    std::vector<float> a = Outputs(threads.ctx, {x.data(), tokens, hidden}, {gate.data(), width});
    const std::vector<float> b = Outputs(threads.ctx, {x.data(), tokens, hidden}, {up.data(), width});
    for (size_t i = 0; i < a.size(); ++i) a[i] = a[i] / (1 + std::exp(-a[i])) * b[i];
    return Outputs(threads.ctx, {a.data(), tokens, width}, {down.data(), hidden});
  };
  const std::vector<float> before = run();
  std::vector<float> scales(width);
  for (int i = 0; i < width; ++i) scales[i] = std::exp2(static_cast<float>(i % 9 - 4));
  Folding folding;
  folding.Add("model.layers.0.mlp.up_proj", scales);
  folding.Apply(threads.ctx, "model.layers.0.mlp.up_proj", 0, width, hidden, up.data());
  folding.Apply(threads.ctx, "model.layers.0.mlp.down_proj", 0, hidden, width, down.data());
  EXPECT_EQ(run(), before);
}

TEST(Smooth, BitsDoNotDependOnThreads) {
  const TestContext one(1), three(3);
  const OutlierLayer layer(30);
  const SmoothOptions options{.grid = {GridKind::kInt8Channel, 0}, .static_activations = true};
  const auto a = Search(one, layer, options), b = Search(three, layer, options);
  EXPECT_EQ(a->scales, b->scales);
  EXPECT_EQ(a->loss, b->loss);
}

TEST(Activation, StaticScalesFollowTheirRule) {
  const TestContext threads(3);
  // 100,000 values up to 1, and three outliers.
  std::vector<float> x(100000);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 1000) / 1000 * (i % 2 == 0 ? 1 : -1);
  x[17] = x[500] = 50;
  x[99] = -60;
  ActivationRange range(100);
  range.Add(threads.ctx, {x.data(), 1000, 100}, {});
  EXPECT_EQ(range.largest()[99], 60);
  EXPECT_EQ(range.Scale(RangeRule::kLargest), 60.0F / 127);
  // 0.01% of 100,000 are 10, so the outliers are above the percentile and the largest other values are not.
  // Bins are 2^(1/32) apart.
  EXPECT_NEAR(range.Scale(RangeRule::kPercentile) * 127, 1, 0.03);
  // Finds the best clipping by trying all.
  const auto error = [&](float scale) {
    const std::vector<float> rounded = RoundActivations(threads.ctx, {x.data(), 1000, 100}, scale);
    return SquaredDistance(threads.ctx, x, rounded);
  };
  double least = HUGE_VAL;
  for (float clip = 0.9F; clip < 60; clip *= 1.02F) least = std::min(least, error(clip / 127));
  EXPECT_LT(error(range.Scale(RangeRule::kSquaredError)), 1.05 * least);
  ActivationRange zeros(4);
  EXPECT_EQ(zeros.Scale(RangeRule::kLargest), 1);
  // Values so small that a scale of their own would have no inverse.
  const std::vector<float> small = {1e-37F, 1e-40F, 0, -1e-37F};
  ActivationRange tiny(2);
  tiny.Add(threads.ctx, {small.data(), 2, 2}, {});
  for (const RangeRule rule : {RangeRule::kLargest, RangeRule::kPercentile, RangeRule::kSquaredError}) {
    EXPECT_EQ(tiny.Scale(rule), tensor::StaticScale::kMin);
  }
}

TEST(Smooth, NearZeroInputsHaveAFiniteLoss) {
  const TestContext threads(1);
  OutlierLayer layer(1);
  for (float& x : layer.x) x *= 1e-37F;
  for (float& x : layer.largest) x *= 1e-37F;
  layer.x[0] = 0;
  const auto found =
      Search(threads, layer, {.grid = {GridKind::kInt8Channel, 0}, .static_activations = true});
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_TRUE(std::isfinite(found->loss));
  EXPECT_TRUE(std::isfinite(found->loss_without));
}

TEST(Activation, DivisorsEqualSmoothedInputs) {
  const TestContext threads(2);
  const std::vector<float> x = {8, -3, 0.5F, 2}, divisors = {4, 1};
  ActivationRange range(2);
  range.Add(threads.ctx, {x.data(), 2, 2}, divisors);
  EXPECT_THAT(range.largest(), testing::ElementsAre(2, 3));
}

TEST(Activation, ChoosesDynamicScalesIfAStaticOneCostsTooMuch) {
  const TestContext threads(2);
  OutlierLayer layer(1);
  const WeightRows weights = layer.weights();
  const float even = *std::max_element(layer.largest.begin(), layer.largest.end()) / 127;
  const auto good = ChooseActivations(threads.ctx, layer.tokens(), {&weights, 1}, {&weights, 1}, even, 20);
  EXPECT_TRUE(good.is_static);
  // One token is a thousand times as large as the others.
  for (int i = 0; i < kInputs; ++i) layer.x[i] *= 1000;
  const auto bad = ChooseActivations(threads.ctx, {layer.x.data() + kInputs, kTokens - 1, kInputs},
                                     {&weights, 1}, {&weights, 1}, 1000 * even, 20);
  EXPECT_FALSE(bad.is_static);
  EXPECT_GT(bad.static_loss, 20 * bad.dynamic_loss);
}

}  // namespace
}  // namespace moesaic::quantizer
