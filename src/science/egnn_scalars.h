// Scalars per edge that EGNN's forward and backward passes compute alike.
#pragma once

#include <cmath>

#include "science/egnn.h"

namespace moesaic::science {

// The authors' program adds it to a distance before a division.
inline constexpr float kDistanceEps = 1e-8F;

inline float RowDot(const float* a, const float* b, int n) {
  float sum = 0;
  for (int i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

inline float SigmoidOf(float x) { return 1 / (1 + std::exp(-x)); }

}  // namespace moesaic::science
