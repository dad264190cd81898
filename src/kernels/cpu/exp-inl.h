// The vector exponential over the lanes of simd_<isa>-inl.h, which includes this file.
#pragma once

namespace moesaic::kernels {
namespace {

/// e^x for x <= 0; below kExpLowest it is clamped to 2^-126. NaN is preserved. The relative error is below
/// 2^-23:
/// - 2^-24 for the last rounding of 1 + r u;
/// - r u carries u's roundings, at most 1.2 * 2^-24 * |r| / e^r <= 0.6 * 2^-24;
/// - r itself is rounded to 2^-26;
/// - the polynomial has an error of 2^-28.
inline V Exp(V x) {
  x = Max(Set(kExpLowest), x);
  const V n = Round(Mul(x, Set(kLog2E)));
  V r = NegFma(n, Set(kLn2High), x);
  r = NegFma(n, Set(kLn2Low), r);
  V q = Fma(r, Set(kExp4), Set(kExp3));
  q = Fma(r, q, Set(kExp2));
  q = Fma(r, q, Set(kExp1));
  q = Fma(r, q, Set(kExp0));
  const V u = Fma(r, q, Set(1.0F));
  return Scale(Fma(r, u, Set(1.0F)), n);
}

/// x / (1 + e^-x), computed from e^-|x| <= 1, which cannot overflow.
inline V Silu(V x) {
  const V e = Exp(Sub(Zero(), Abs(x)));
  return Div(Mul(x, SelectNegative(x, e, Set(1.0F))), Add(Set(1.0F), e));
}

}  // namespace
}  // namespace moesaic::kernels
