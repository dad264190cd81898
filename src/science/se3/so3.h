// Real spherical harmonics and Clebsch-Gordan coefficients in the conventions of e3nn: components m = -l..l,
// vectors as (x, y, z) with y as the polar axis, so that degree 1 is (x, y, z).
#pragma once

#include <span>
#include <vector>

namespace moesaic::science {

inline constexpr int kMaxDegree = 8;

/// Wigner 3j symbols of real harmonics, [2 l1 + 1, 2 l2 + 1, 2 l3 + 1], of norm 1: e3nn's wigner_3j. Zeros
/// unless |l1 - l2| <= l3 <= l1 + l2. Degrees must be in [0, kMaxDegree].
std::vector<double> Wigner3j(int l1, int l2, int l3);

/// Evaluates harmonics of degrees 0..max_degree, normalized on the sphere ("integral"), for directions of
/// vectors.
class SphericalHarmonics {
 public:
  explicit SphericalHarmonics(int max_degree);
  int max_degree() const { return static_cast<int>(steps_.size()); }
  static int Offset(int degree) { return degree * degree; }
  int size() const { return Offset(max_degree() + 1); }
  /// Writes all degrees [size()] for the direction of a vector; the direction of zero is zero, of which only
  /// degree 0 is not 0.
  void Evaluate(const float* xyz, float* out) const;
  /// Adds the gradient by the vector for that of the harmonics, grad [size()], to xyz_grad [3]. It is 0 for a
  /// vector of zero.
  void AddGradient(const float* xyz, const float* grad, float* xyz_grad) const;

 private:
  struct Term {
    int i, j, m;  // out[m] += weight * direction[i] * previous[j]
    double weight;
  };
  std::vector<std::vector<Term>> steps_;  // from degree l to l + 1
};

}  // namespace moesaic::science
