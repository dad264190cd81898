// f32 rows over the lanes of lanes_<isa>-inl.h, which must be included first.
#pragma once

namespace moesaic::graph::cpu {
namespace {

inline V Sigmoid(V x) {
  const V e = Exp(Sub(Zero(), Abs(x)));  // e^-|x| cannot overflow
  return Div(SelectNegative(x, e, Set(1.0F)), Add(Set(1.0F), e));
}

/// The error function by Abramowitz and Stegun 7.1.26, with an absolute error of 1.5e-7.
inline V Erf(V x) {
  const V z = Abs(x);
  const V t = Div(Set(1.0F), Fma(Set(0.3275911F), z, Set(1.0F)));
  V p = Fma(Set(1.061405429F), t, Set(-1.453152027F));
  p = Fma(p, t, Set(1.421413741F));
  p = Fma(p, t, Set(-0.284496736F));
  p = Fma(p, t, Set(0.254829592F));
  const V y = NegFma(Mul(p, t), Exp(Negate(Mul(z, z))), Set(1.0F));
  return SelectNegative(x, Negate(y), y);
}

inline V Activated(V x, Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return Silu(x);
    case Activation::kRelu:
      return Max(Zero(), x);  // keeps NaN
    case Activation::kGelu:
      return Mul(Mul(Set(0.5F), x), Add(Set(1.0F), Erf(Mul(x, Set(0.70710678F)))));
    case Activation::kSigmoid:
      return Sigmoid(x);
    case Activation::kNone:
      break;
  }
  return x;
}

inline int Lanes(int n, int i) { return n - i < kLanes ? n - i : kLanes; }

void ActivateRow(const float* const* rows, int count, const float* weights, float scale, int n,
                 Activation activation, float* y) {
  for (int i = 0; i < n; i += kLanes) {
    const int lanes = Lanes(n, i);
    V x = weights != nullptr ? Mul(Set(scale), kernels::LoadFirst(weights + i, lanes)) : Zero();
    for (int r = 0; r < count; ++r) x = Add(x, kernels::LoadFirst(rows[r] + i, lanes));
    kernels::StoreFirst(y + i, Activated(x, activation), lanes);
  }
}

void LayerNormRow(const float* x, const float* gamma, const float* beta, int n, float eps, float* y) {
  V sum = Zero();
  for (int i = 0; i < n; i += kLanes) sum = Add(sum, kernels::LoadFirst(x + i, Lanes(n, i)));
  const float mean = SumLanes(sum) / static_cast<float>(n);
  V squares = Zero();
  for (int i = 0; i < n; i += kLanes) {
    const int lanes = Lanes(n, i);
    float centered[kLanes];
    kernels::Store(centered, Sub(kernels::LoadFirst(x + i, lanes), Set(mean)));
    const V d = kernels::LoadFirst(centered, lanes);  // clears lanes beyond the row
    squares = Fma(d, d, squares);
  }
  const float inverse = 1.0F / __builtin_sqrtf(SumLanes(squares) / static_cast<float>(n) + eps);
  for (int i = 0; i < n; i += kLanes) {
    const int lanes = Lanes(n, i);
    V v = Mul(Sub(kernels::LoadFirst(x + i, lanes), Set(mean)), Set(inverse));
    if (gamma != nullptr) v = Mul(v, kernels::LoadFirst(gamma + i, lanes));
    if (beta != nullptr) v = Add(v, kernels::LoadFirst(beta + i, lanes));
    kernels::StoreFirst(y + i, v, lanes);
  }
}

void GateRow(const float* x, const float* gate, int n, float* y) {
  for (int i = 0; i < n; i += kLanes) {
    const int lanes = Lanes(n, i);
    kernels::StoreFirst(
        y + i, Mul(kernels::LoadFirst(x + i, lanes), Sigmoid(kernels::LoadFirst(gate + i, lanes))), lanes);
  }
}

void ExpRow(float* x, int n) {
  for (int i = 0; i < n; i += kLanes) {
    const int lanes = Lanes(n, i);
    kernels::StoreFirst(x + i, Exp(kernels::LoadFirst(x + i, lanes)), lanes);
  }
}

void SoftmaxOfRow(float* x, int n) {
  float max = -__builtin_inff();
  V best = Set(max);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) best = Max(kernels::Load(x + i), best);
  max = MaxLanes(best);
  for (; i < n; ++i) max = x[i] > max ? x[i] : max;
  if (max == -__builtin_inff()) {
    for (int j = 0; j < n; ++j) x[j] = 0;
    return;
  }
  V sum = Zero();
  for (i = 0; i < n; i += kLanes) {
    const int lanes = Lanes(n, i);
    kernels::StoreFirst(x + i, Exp(Sub(kernels::LoadFirst(x + i, lanes), Set(max))), lanes);
    sum = Add(sum, kernels::LoadFirst(x + i, lanes));
  }
  const V inverse = Set(1.0F / SumLanes(sum));
  for (i = 0; i < n; i += kLanes) {
    const int lanes = Lanes(n, i);
    kernels::StoreFirst(x + i, Mul(kernels::LoadFirst(x + i, lanes), inverse), lanes);
  }
}

}  // namespace
}  // namespace moesaic::graph::cpu
