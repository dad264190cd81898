// Values of one pass of invariant point attention, shared by its forward and backward passes.
#pragma once

#include <array>
#include <vector>

#include "science/invariant_points.h"

namespace moesaic::science {

using Vec3 = std::array<float, 3>;

// OpenFold's projections have x, y and z of all points one after another.
inline Vec3 PointOf(const float* row, int points, int point) {
  return {row[point], row[points + point], row[2 * points + point]};
}

// Returns rotation x, without the translation.
inline Vec3 Turned(const float* r, const Vec3& x) {
  Vec3 out;
  for (int row = 0; row < 3; ++row)
    out[row] = r[3 * row] * x[0] + r[3 * row + 1] * x[1] + r[3 * row + 2] * x[2];
  return out;
}
// Returns the transpose of the rotation times x.
inline Vec3 TurnedBack(const float* r, const Vec3& x) {
  Vec3 out;
  for (int column = 0; column < 3; ++column)
    out[column] = r[column] * x[0] + r[3 + column] * x[1] + r[6 + column] * x[2];
  return out;
}

// Arrays are in the context's scratch memory. Operands of one head: queries [n, width], keys transposed
// [width, n], values [n, v_width], with points in global coordinates around their mean.
struct InvariantPointAttention::State {
  int width = 0, v_width = 0;
  float *q = nullptr, *kv = nullptr, *q_points = nullptr, *kv_points = nullptr;  // projections of s
  float *queries = nullptr, *keys = nullptr, *values = nullptr;                  // [heads][...]
  float* features = nullptr;                                                     // [n, inputs of linear_out]
  float* weights = nullptr;  // [n, heads, n] after the softmax, or null: not kept
  const float* rotation = nullptr;
  std::vector<float> centered;  // [n, 3]: translations minus their mean
};

}  // namespace moesaic::science
