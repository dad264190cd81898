#include "science/se3/so3.h"

#include <algorithm>
#include <cmath>
#include <complex>

#include "base/check.h"

namespace moesaic::science {
namespace {

using Complex = std::complex<double>;
constexpr double kPi = 3.14159265358979323846;

double Factorial(int n) {
  double value = 1;
  for (int i = 2; i <= n; ++i) value *= i;
  return value;
}

// <l1 m1 l2 m2 | l3 m3> of SU(2) by Racah's formula.
double CoupledState(int l1, int m1, int l2, int m2, int l3, int m3) {
  if (m3 != m1 + m2) return 0;
  const int low = std::max({-l1 + l2 + m3, -l1 + m1, 0}),
            high = std::min({l2 + l3 + m1, l3 - l1 + l2, l3 + m3});
  const double scale = std::sqrt((2.0 * l3 + 1) * Factorial(l3 + l1 - l2) * Factorial(l3 - l1 + l2) *
                                 Factorial(l1 + l2 - l3) * Factorial(l3 + m3) * Factorial(l3 - m3) /
                                 (Factorial(l1 + l2 + l3 + 1) * Factorial(l1 - m1) * Factorial(l1 + m1) *
                                  Factorial(l2 - m2) * Factorial(l2 + m2)));
  double sum = 0;
  for (int v = low; v <= high; ++v) {
    const double sign = (v + l2 + m2) % 2 == 0 ? 1 : -1;
    sum +=
        sign * Factorial(l2 + l3 + m1 - v) * Factorial(l1 - m1 + v) /
        (Factorial(v) * Factorial(l3 - l1 + l2 - v) * Factorial(l3 + m3 - v) * Factorial(v + l1 - l2 - m3));
  }
  return scale * sum;
}

// Rows: complex components; columns: real components. The factor makes coefficients real.
std::vector<Complex> RealToComplex(int l) {
  const int n = 2 * l + 1;
  const double half = std::sqrt(0.5);
  std::vector<Complex> q(n * n);
  for (int m = 1; m <= l; ++m) {
    const double sign = m % 2 == 0 ? 1 : -1;
    q[(l - m) * n + l + m] = half;
    q[(l - m) * n + l - m] = Complex(0, -half);
    q[(l + m) * n + l + m] = sign * half;
    q[(l + m) * n + l - m] = Complex(0, sign * half);
  }
  q[l * n + l] = 1;
  const Complex factors[] = {{1, 0}, {0, -1}, {-1, 0}, {0, 1}};  // (-i)^l
  for (Complex& x : q) x *= factors[l % 4];
  return q;
}

}  // namespace

std::vector<double> Wigner3j(int l1, int l2, int l3) {
  for (const int l : {l1, l2, l3}) MOESAIC_CHECK(l >= 0 && l <= 2 * kMaxDegree);
  const int n1 = 2 * l1 + 1, n2 = 2 * l2 + 1, n3 = 2 * l3 + 1;
  std::vector<double> out(n1 * n2 * n3, 0);
  if (l3 < std::abs(l1 - l2) || l3 > l1 + l2) return out;
  const std::vector<Complex> q1 = RealToComplex(l1), q2 = RealToComplex(l2), q3 = RealToComplex(l3);
  double norm = 0;
  for (int a = 0; a < n1; ++a) {
    for (int b = 0; b < n2; ++b) {
      for (int c = 0; c < n3; ++c) {
        Complex sum = 0;
        for (int i = 0; i < n1; ++i) {
          for (int k = 0; k < n2; ++k) {
            const int n = (i - l1) + (k - l2) + l3;  // m3 = m1 + m2
            if (n < 0 || n >= n3) continue;
            const Complex factor = q1[i * n1 + a] * q2[k * n2 + b] * std::conj(q3[n * n3 + c]);
            // Real components have one complex component or two, so that most terms are 0.
            if (factor != Complex(0)) sum += factor * CoupledState(l1, i - l1, l2, k - l2, l3, n - l3);
          }
        }
        out[(a * n2 + b) * n3 + c] = sum.real();
        norm += sum.real() * sum.real();
      }
    }
  }
  for (double& x : out) {
    x /= std::sqrt(norm);
    if (std::abs(x) < 1e-14) x = 0;
  }
  return out;
}

SphericalHarmonics::SphericalHarmonics(int max_degree) {
  MOESAIC_CHECK(max_degree >= 0 && max_degree <= 2 * kMaxDegree);
  // Degree l + 1 is the product of the direction with degree l, scaled to sqrt((2 l + 3) / 4 pi) at (0, 1,
  // 0), where degree l has only its component m = 0.
  for (int l = 0; l < max_degree; ++l) {
    const std::vector<double> w = Wigner3j(1, l, l + 1);
    const int n2 = 2 * l + 1, n3 = 2 * l + 3;
    const double at_pole = w[(1 * n2 + l) * n3 + l + 1] * std::sqrt((2.0 * l + 1) / (4 * kPi));
    const double scale = std::sqrt((2.0 * l + 3) / (4 * kPi)) / at_pole;
    std::vector<Term> terms;
    for (int i = 0; i < 3; ++i) {
      for (int j = 0; j < n2; ++j) {
        for (int m = 0; m < n3; ++m) {
          if (w[(i * n2 + j) * n3 + m] != 0) terms.push_back({i, j, m, scale * w[(i * n2 + j) * n3 + m]});
        }
      }
    }
    steps_.push_back(std::move(terms));
  }
}

void SphericalHarmonics::Evaluate(const float* xyz, float* out) const {
  double direction[3] = {xyz[0], xyz[1], xyz[2]};
  const double length =
      std::sqrt(direction[0] * direction[0] + direction[1] * direction[1] + direction[2] * direction[2]);
  for (double& x : direction) x = length > 0 ? x / length : 0;
  double previous[4 * kMaxDegree + 1] = {std::sqrt(1 / (4 * kPi))};
  out[0] = static_cast<float>(previous[0]);
  for (int l = 0; l < max_degree(); ++l) {
    double next[4 * kMaxDegree + 1] = {};
    for (const Term& term : steps_[l]) next[term.m] += term.weight * direction[term.i] * previous[term.j];
    for (int m = 0; m < 2 * l + 3; ++m) {
      previous[m] = next[m];
      out[Offset(l + 1) + m] = static_cast<float>(next[m]);
    }
  }
}

void SphericalHarmonics::AddGradient(const float* xyz, const float* grad, float* xyz_grad) const {
  double direction[3] = {xyz[0], xyz[1], xyz[2]};
  const double length =
      std::sqrt(direction[0] * direction[0] + direction[1] * direction[1] + direction[2] * direction[2]);
  if (length == 0) return;
  for (double& x : direction) x /= length;
  constexpr int kComponents = 4 * kMaxDegree + 1;
  double values[2 * kMaxDegree + 1][kComponents] = {};
  values[0][0] = std::sqrt(1 / (4 * kPi));
  for (int l = 0; l < max_degree(); ++l) {
    for (const Term& term : steps_[l])
      values[l + 1][term.m] += term.weight * direction[term.i] * values[l][term.j];
  }
  double by_direction[3] = {}, by_degree[kComponents] = {};
  for (int l = max_degree() - 1; l >= 0; --l) {
    double before[kComponents] = {};
    for (int m = 0; m < 2 * l + 3; ++m) by_degree[m] += grad[Offset(l + 1) + m];
    for (const Term& term : steps_[l]) {
      by_direction[term.i] += term.weight * values[l][term.j] * by_degree[term.m];
      before[term.j] += term.weight * direction[term.i] * by_degree[term.m];
    }
    std::copy_n(before, kComponents, by_degree);
  }
  const double along =
      by_direction[0] * direction[0] + by_direction[1] * direction[1] + by_direction[2] * direction[2];
  for (int axis = 0; axis < 3; ++axis)
    xyz_grad[axis] += static_cast<float>((by_direction[axis] - along * direction[axis]) / length);
}

}  // namespace moesaic::science
