// Frames of the structure module, shared by its forward and backward passes.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "science/invariant_points_state.h"
#include "science/structure_module.h"

namespace moesaic::science {

inline constexpr float kAngstroms = 10;     // the module computes in nanometers
inline constexpr float kAngleEps = 1e-12F;  // least squared length of a sine and cosine
inline constexpr int kChi2 = 5;             // groups from chi2 on turn the group before them

// A rigid transform x -> r x + t.
struct Rigid {
  std::array<float, 9> r = {1, 0, 0, 0, 1, 0, 0, 0, 1};
  std::array<float, 3> t = {0, 0, 0};
};

inline std::array<float, 3> Moved(const Rigid& rigid, const float* x) {
  std::array<float, 3> y;
  for (int row = 0; row < 3; ++row) {
    const float* r = rigid.r.data() + 3 * row;
    y[row] = r[0] * x[0] + r[1] * x[1] + r[2] * x[2] + rigid.t[row];
  }
  return y;
}

// Returns the transform x -> a(b(x)).
inline Rigid Composed(const Rigid& a, const Rigid& b) {
  Rigid c;
  for (int row = 0; row < 3; ++row) {
    for (int column = 0; column < 3; ++column) {
      float sum = 0;
      for (int k = 0; k < 3; ++k) sum += a.r[3 * row + k] * b.r[3 * k + column];
      c.r[3 * row + column] = sum;
    }
  }
  c.t = Moved(a, b.t.data());
  return c;
}

inline Rigid FromMatrix(const float* m) {  // [4, 4]
  Rigid rigid;
  for (int row = 0; row < 3; ++row) {
    std::copy_n(m + 4 * row, 3, rigid.r.data() + 3 * row);
    rigid.t[row] = m[4 * row + 3];
  }
  return rigid;
}

inline void ToMatrix(const Rigid& rigid, float* m) {
  for (int row = 0; row < 3; ++row) {
    std::copy_n(rigid.r.data() + 3 * row, 3, m + 4 * row);
    m[4 * row + 3] = rigid.t[row];
  }
  std::fill_n(m + 12, 3, 0.0F);
  m[15] = 1;
}

inline void RotationOf(const float* q, float* r) {  // of a unit quaternion (w, x, y, z)
  const float w = q[0], x = q[1], y = q[2], z = q[3];
  const float values[9] = {
      w * w + x * x - y * y - z * z, 2 * (x * y - w * z),           2 * (x * z + w * y),
      2 * (x * y + w * z),           w * w - x * x + y * y - z * z, 2 * (y * z - w * x),
      2 * (x * z - w * y),           2 * (y * z + w * x),           w * w - x * x - y * y + z * z};
  std::copy_n(values, 9, r);
}

// A group in its parent: the idealized frame, turned by the torsion around its x axis.
inline Rigid TurnedGroup(const float* frame, float sine, float cosine) {
  return Composed(FromMatrix(frame), {.r = {1, 0, 0, 0, cosine, -sine, 0, sine, cosine}, .t = {0, 0, 0}});
}

// Frames of all residues during the iterations.
struct StructureModule::Backbone {
  std::vector<float> quaternion, rotation, translation;  // [n, 4], [n, 9], [n, 3]

  explicit Backbone(int64_t n) : quaternion(4 * n), rotation(9 * n), translation(3 * n) {
    for (int64_t i = 0; i < n; ++i) {
      quaternion[4 * i] = 1;
      for (int axis = 0; axis < 3; ++axis) rotation[9 * i + 4 * axis] = 1;
    }
  }
  int64_t size() const { return static_cast<int64_t>(translation.size()) / 3; }

  // Algorithm 23 in OpenFold's form: q += q (0, b, c, d), normalized; t += R t'. update is [n, 6].
  void Update(const float* update) {
    for (int64_t i = 0; i < size(); ++i) {
      const float* u = update + 6 * i;
      const Vec3 shift = Turned(rotation.data() + 9 * i, {u[3], u[4], u[5]});
      for (int axis = 0; axis < 3; ++axis) translation[3 * i + axis] += shift[axis];
      float* q = quaternion.data() + 4 * i;
      const float w = q[0], x = q[1], y = q[2], z = q[3];
      q[0] += -x * u[0] - y * u[1] - z * u[2];
      q[1] += w * u[0] + y * u[2] - z * u[1];
      q[2] += w * u[1] + z * u[0] - x * u[2];
      q[3] += w * u[2] + x * u[1] - y * u[0];
      const float norm = std::sqrt(q[0] * q[0] + q[1] * q[1] + q[2] * q[2] + q[3] * q[3]);
      for (int k = 0; k < 4; ++k) q[k] /= norm;
      RotationOf(q, rotation.data() + 9 * i);
    }
  }
};

// Divides sines and cosines [n, 7, 2] by their length.
inline void NormalizeAngles(int64_t n, const float* unnormalized, float* angles) {
  for (int64_t i = 0; i < n * kTorsions; ++i) {
    const float sine = unnormalized[2 * i], cosine = unnormalized[2 * i + 1];
    const float norm = std::sqrt(std::max(sine * sine + cosine * cosine, kAngleEps));
    angles[2 * i] = sine / norm;
    angles[2 * i + 1] = cosine / norm;
  }
}

// Arrays of all iterations, in the context's scratch memory.
struct StructureModule::Iterations {
  int64_t n;
  float* initial;  // [n, c_s]: normalized single features
  float* s;        // [n, c_s]: the state
  float* update;   // [n, c_s] or [n, 6]: the last update of the state or, after an iteration, of the frames
  float* z;        // [n, n, c_z]: normalized pair features
  float* bias;     // [n, heads, n]: of the attention
  Backbone backbone;
};

}  // namespace moesaic::science
