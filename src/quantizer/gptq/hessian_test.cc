#include "quantizer/gptq/hessian.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "quantizer/gptq/gptq.h"
#include "quantizer/test_context.h"
#include "tensor/dtype.h"

namespace moesaic::quantizer {
namespace {

float Rounded(float value) { return tensor::ToFloat(tensor::ToBF16(value)); }

// Compares every sum with double precision on the rounded values. f32 sums of t products have an error of at
// most t/2 units in the last place (2^-24) of the sum of magnitudes; the end of a chunk adds one.
void ExpectProducts(const Hessian& hessian, const std::vector<float>& x) {
  const int k = hessian.k();
  const size_t tokens = x.size() / k;
  for (int i = 0; i < k; ++i) {
    for (int j = 0; j <= i; ++j) {
      double sum = 0, magnitude = 0;
      for (size_t t = 0; t < tokens; ++t) {
        const double product = double{Rounded(x[t * k + i])} * Rounded(x[t * k + j]);
        sum += product;
        magnitude += std::fabs(product);
      }
      ASSERT_NEAR(hessian.sums(i)[j], sum, magnitude * static_cast<double>(tokens) * 0x1p-24)
          << i << " " << j;
    }
  }
}

TEST(Hessian, SumsProductsForOddSizes) {
  const TestContext threads(2);
  for (const int k : {1, 17, 130, 300}) {
    for (const int tokens : {1, 63, 1500}) {
      const std::vector<float> x = TestTokens(tokens, k, 1, tokens);
      auto hessian = Hessian::Create(k);
      ASSERT_TRUE(hessian.ok());
      hessian->Add(threads.ctx, AllTokens(x, k));
      ExpectProducts(*hessian, x);
      EXPECT_EQ(hessian->tokens(), tokens);
    }
  }
}

TEST(Hessian, AcceptsBf16AndStridedRows) {
  const TestContext threads(2);
  const int k = 40, tokens = 77, stride = 48;
  const std::vector<float> x = TestTokens(tokens, k, 1, 6);
  std::vector<tensor::BF16> apart(tokens * stride, tensor::ToBF16(1e9F));
  for (int t = 0; t < tokens; ++t) {
    for (int i = 0; i < k; ++i) apart[t * stride + i] = tensor::ToBF16(x[t * k + i]);
  }
  auto hessian = Hessian::Create(k);
  hessian->Add(threads.ctx, {.f32 = nullptr, .bf16 = apart.data(), .stride = stride, .count = tokens});
  ExpectProducts(*hessian, x);
}

TEST(Hessian, BitsDoNotDependOnThreadsAndMergeAddsSums) {
  const TestContext one(1), three(3);
  const int k = 200;
  const std::vector<float> a = TestTokens(1100, k, 1, 7), b = TestTokens(70, k, 1, 8);
  auto whole = Hessian::Create(k), other = Hessian::Create(k), part = Hessian::Create(k);
  whole->Add(one.ctx, AllTokens(a, k));
  other->Add(three.ctx, AllTokens(a, k));
  for (int i = 0; i < k; ++i) {
    for (int j = 0; j <= i; ++j) ASSERT_EQ(whole->sums(i)[j], other->sums(i)[j]);
  }
  part->Add(three.ctx, AllTokens(b, k));
  part->Merge(three.ctx, *other);
  EXPECT_EQ(part->tokens(), 1170);
  part->Clear(three.ctx);
  EXPECT_EQ(part->tokens(), 0);
  EXPECT_EQ(part->sums(k - 1)[k - 1], 0);
}

// Such inputs must not be taken for inputs that are all 0, which need no Hessian.
TEST(Hessian, InputsThatAreNotFiniteAreAnError) {
  const TestContext threads(2);
  const int k = 24;
  std::vector<float> x = TestTokens(40, k, 1, 3);
  std::fill_n(x.begin(), k, std::numeric_limits<float>::quiet_NaN());
  auto hessian = Hessian::Create(k);
  EXPECT_FALSE(hessian->any());
  hessian->Add(threads.ctx, AllTokens(x, k));
  EXPECT_TRUE(hessian->any());
  const auto factor = FactorHessian(threads.ctx, *hessian, {});
  EXPECT_EQ(Message(factor.status()), "input 0 of this layer is not finite in every calibration token");
}

// Returns the loss of GPTQ by one Hessian on the tokens of another.
double LossOn(const TestContext& threads, const Hessian& hessian, const HessianFactor& truth) {
  const int n = 64, k = truth.k;
  const std::vector<float> weights = TestWeights(n, k, 1);
  const auto factor = FactorHessian(threads.ctx, hessian, {});
  GptqReport report;
  const auto matrix =
      RoundByGptq(threads.ctx, {GridKind::kInt4Group, 32}, weights.data(), n, k, *factor, {}, &report);
  std::vector<float> errors(weights.size());
  Dequantize(*matrix, 0, n, errors.data());
  for (size_t i = 0; i < errors.size(); ++i) errors[i] = weights[i] - errors[i];
  return OutputLoss(threads.ctx, truth, errors.data(), n);
}

Hessian HessianOfInputs(const TestContext& threads, const std::vector<float>& x, int k) {
  auto hessian = *Hessian::Create(k);
  hessian.Add(threads.ctx, AllTokens(x, k));
  return hessian;
}

TEST(Hessian, ShrinkageGrowsAsTokensGetRare) {
  const TestContext threads(2);
  const int k = 128;
  // Half of the layer's tokens belong to this expert; the inputs of the others have another distribution.
  Hessian layer = HessianOfInputs(threads, TestTokens(3000, k, 1, 9), k);
  const Hessian own_tokens = HessianOfInputs(threads, TestTokens(3000, k, 2, 10), k);
  layer.Merge(threads.ctx, own_tokens);
  const auto truth = *FactorHessian(threads.ctx, own_tokens, {.damping = 1e-4F});
  std::vector<float> one_hot(k * k, 0.0F);
  for (int i = 0; i < k; ++i) one_hot[i * k + i] = 1;
  const double nearest = LossOn(threads, HessianOfInputs(threads, one_hot, k), truth);  // the identity
  const double by_layer = LossOn(threads, layer, truth);
  double last = 1;
  for (const int tokens : {4, 16, 64, 2048}) {
    Hessian own = HessianOfInputs(threads, TestTokens(tokens, k, 2, 11), k);
    const double alone = LossOn(threads, own, truth);
    const double share = ShrinkTowards(threads.ctx, layer, &own);
    const double shrunk = LossOn(threads, own, truth);
    EXPECT_LE(share, last);
    last = share;
    EXPECT_LT(shrunk, 0.5 * nearest) << tokens;
    EXPECT_LT(shrunk, 1.02 * by_layer) << tokens;
    EXPECT_LT(shrunk, tokens <= 32 ? 0.5 * alone : 1.2 * alone) << tokens;
  }
  EXPECT_LT(last, 0.02);
  Hessian none = *Hessian::Create(k);
  EXPECT_EQ(ShrinkTowards(threads.ctx, layer, &none), 1);
  EXPECT_NEAR(LossOn(threads, none, truth), by_layer, 0.02 * by_layer);
}

}  // namespace
}  // namespace moesaic::quantizer
