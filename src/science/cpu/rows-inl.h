// f32 rows over the lanes of lanes_<isa>-inl.h, which must be included first.
#pragma once

#include "science/cpu/masked_exp-inl.h"

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

/// The derivative of Activated(). GELU's Gaussian is an exponential of a value below 0, as Exp() needs.
inline V Derivative(V x, Activation activation) {
  const V one = Set(1.0F);
  const V s = Sigmoid(x);
  switch (activation) {
    case Activation::kSilu:
      return Mul(s, Fma(x, Sub(one, s), one));
    case Activation::kRelu:
      return SelectNegative(Negate(x), one, Zero());
    case Activation::kGelu: {
      const V normal = Mul(Set(0.39894228F), Exp(Mul(Set(-0.5F), Mul(x, x))));
      return Fma(x, normal, Mul(Set(0.5F), Add(one, Erf(Mul(x, Set(0.70710678F))))));
    }
    case Activation::kSigmoid:
      return Mul(s, Sub(one, s));
    case Activation::kNone:
      break;
  }
  return one;
}

// Access to a whole vector or to the first n lanes. Masked stores take several times as long as plain ones on
// AMD's AVX2 processors, so that only the tail of a row uses them.
struct WholeLanes {
  static V Load(const float* p) { return kernels::Load(p); }
  static void Store(float* p, V x) { kernels::Store(p, x); }
  static V Clear(V x) { return x; }
};
struct FirstOfLanes {
  int n;
  V Load(const float* p) const { return kernels::LoadFirst(p, n); }
  void Store(float* p, V x) const { kernels::StoreFirst(p, x, n); }
  /// Sets lanes beyond the row to 0.
  V Clear(V x) const {
    float lanes[kLanes];
    kernels::Store(lanes, x);
    return kernels::LoadFirst(lanes, n);
  }
};

// Calls body(first element, lanes) for the vectors of a row.
template <typename Body>
inline void ForLanes(int n, const Body& body) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, WholeLanes{});
  if (i < n) body(i, FirstOfLanes{n - i});
}

template <Activation activation>
inline void ActivateAs(const float* const* rows, int count, const float* weights, float scale, int n,
                       float* y) {
  ForLanes(n, [&](int i, auto lanes) {
    V x = weights != nullptr ? Mul(Set(scale), lanes.Load(weights + i)) : Zero();
    for (int r = 0; r < count; ++r) x = Add(x, lanes.Load(rows[r] + i));
    lanes.Store(y + i, Activated(x, activation));
  });
}

void ActivateRow(const float* const* rows, int count, const float* weights, float scale, int n,
                 Activation activation, float* y) {
  switch (activation) {
    case Activation::kSilu:
      return ActivateAs<Activation::kSilu>(rows, count, weights, scale, n, y);
    case Activation::kRelu:
      return ActivateAs<Activation::kRelu>(rows, count, weights, scale, n, y);
    case Activation::kGelu:
      return ActivateAs<Activation::kGelu>(rows, count, weights, scale, n, y);
    case Activation::kSigmoid:
      return ActivateAs<Activation::kSigmoid>(rows, count, weights, scale, n, y);
    case Activation::kNone:
      return ActivateAs<Activation::kNone>(rows, count, weights, scale, n, y);
  }
}

void ActivateGradientRow(const float* x, const float* grad, int n, Activation activation, float* out) {
  ForLanes(n, [&](int i, auto lanes) {
    lanes.Store(out + i, Mul(lanes.Load(grad + i), Derivative(lanes.Load(x + i), activation)));
  });
}

struct RowMoments {
  float mean, inverse;  // inverse: 1 / sqrt(variance + eps)
};

inline RowMoments MomentsOf(const float* x, int n, float eps) {
  V sum = Zero(), squares = Zero();
  ForLanes(n, [&](int i, auto lanes) { sum = Add(sum, lanes.Load(x + i)); });
  const float mean = SumLanes(sum) / static_cast<float>(n);
  ForLanes(n, [&](int i, auto lanes) {
    const V d = lanes.Clear(Sub(lanes.Load(x + i), Set(mean)));
    squares = Fma(d, d, squares);
  });
  return {mean, 1.0F / __builtin_sqrtf(SumLanes(squares) / static_cast<float>(n) + eps)};
}

void LayerNormRow(const float* x, const float* gamma, const float* beta, int n, float eps, float* y) {
  const RowMoments moments = MomentsOf(x, n, eps);
  ForLanes(n, [&](int i, auto lanes) {
    V v = Mul(Sub(lanes.Load(x + i), Set(moments.mean)), Set(moments.inverse));
    if (gamma != nullptr) v = Mul(v, lanes.Load(gamma + i));
    if (beta != nullptr) v = Add(v, lanes.Load(beta + i));
    lanes.Store(y + i, v);
  });
}

// Lanes beyond the row load gradients of 0, which add nothing to the sums.
void LayerNormGradientRow(const float* x, const float* gamma, const float* grad, int n, float eps,
                          float* x_grad, float* gamma_grad, float* beta_grad) {
  const RowMoments moments = MomentsOf(x, n, eps);
  const V mean = Set(moments.mean), inverse = Set(moments.inverse);
  V grad_sum = Zero(), dot = Zero();
  ForLanes(n, [&](int i, auto lanes) {
    const V normal = Mul(Sub(lanes.Load(x + i), mean), inverse), g = lanes.Load(grad + i);
    const V scaled = gamma != nullptr ? Mul(g, lanes.Load(gamma + i)) : g;
    grad_sum = Add(grad_sum, scaled);
    dot = Fma(scaled, normal, dot);
    if (gamma_grad != nullptr) lanes.Store(gamma_grad + i, Fma(g, normal, lanes.Load(gamma_grad + i)));
    if (beta_grad != nullptr) lanes.Store(beta_grad + i, Add(g, lanes.Load(beta_grad + i)));
  });
  const V mean_grad = Set(SumLanes(grad_sum) / static_cast<float>(n)),
          mean_dot = Set(SumLanes(dot) / static_cast<float>(n));
  ForLanes(n, [&](int i, auto lanes) {
    const V normal = Mul(Sub(lanes.Load(x + i), mean), inverse), g = lanes.Load(grad + i);
    const V scaled = gamma != nullptr ? Mul(g, lanes.Load(gamma + i)) : g;
    const V part = NegFma(normal, mean_dot, Sub(scaled, mean_grad));
    lanes.Store(x_grad + i, Fma(inverse, part, lanes.Load(x_grad + i)));
  });
}

void GateRow(const float* x, const float* gate, int n, float* y) {
  ForLanes(n, [&](int i, auto lanes) {
    lanes.Store(y + i, Mul(lanes.Load(x + i), Sigmoid(lanes.Load(gate + i))));
  });
}

void ExpRow(float* x, int n) {
  ForLanes(n, [&](int i, auto lanes) { lanes.Store(x + i, Exp(lanes.Load(x + i))); });
}

void SoftmaxOfRow(float* x, int n) {
  float max = -__builtin_inff();
  V best = Set(max);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) best = Max(kernels::Load(x + i), best);
  max = MaxLanes(best);
  for (; i < n; ++i) max = x[i] > max ? x[i] : max;
  // The maximum of -inf and NaN is -inf. Only the sum distinguishes a row of masked elements from one with
  // NaN.
  const V shift = Set(max < -__FLT_MAX__ ? 0 : max);
  V sum = Zero();
  ForLanes(n, [&](int at, auto lanes) {
    const V e = lanes.Clear(Weight(Sub(lanes.Load(x + at), shift)));
    lanes.Store(x + at, e);
    sum = Add(sum, e);
  });
  const float total = SumLanes(sum);
  const V inverse = Set(total == 0 ? 0 : 1.0F / total);
  ForLanes(n, [&](int at, auto lanes) { lanes.Store(x + at, Mul(lanes.Load(x + at), inverse)); });
}

}  // namespace
}  // namespace moesaic::graph::cpu
