#include "science/protein/mpnn_features.h"

#include <algorithm>
#include <cmath>

namespace moesaic::science {
namespace {

enum MpnnAtom { kCa, kN, kC, kO, kCb };
// Pairs (atom of i, atom of its neighbour) after CA-CA, in the order of the published weights.
constexpr std::array<std::pair<MpnnAtom, MpnnAtom>, kMpnnAtomPairs - 1> kPairs = {
    {{kN, kN},  {kC, kC},   {kO, kO},  {kCb, kCb}, {kCa, kN}, {kCa, kC}, {kCa, kO}, {kCa, kCb},
     {kN, kC},  {kN, kO},   {kN, kCb}, {kCb, kC},  {kCb, kO}, {kO, kC},  {kN, kCa}, {kC, kCa},
     {kO, kCa}, {kCb, kCa}, {kC, kN},  {kO, kN},   {kCb, kN}, {kC, kCb}, {kO, kCb}, {kC, kO}}};
constexpr float kEps = 1e-6F;  // under the root of a distance

constexpr int kBackboneOf[] = {1, 0, 2, 3};  // place of kCa, kN, kC, kO in the input
constexpr float kFirstRbf = 2, kLastRbf = 22, kSigma = (kLastRbf - kFirstRbf) / kMpnnRbf;
// CB of an ideal residue is kAcross (b x c) + kAlongB b + kAlongC c + CA, for b = CA - N and c = C - CA.
constexpr float kAcross = -0.58273431F, kAlongB = 0.56802827F, kAlongC = -0.54067466F;

// The argument of radial basis function m, whose value is e^-z^2.
float RbfArgument(float distance, int m) {
  return (distance - (kFirstRbf + (kLastRbf - kFirstRbf) * static_cast<float>(m) / (kMpnnRbf - 1))) / kSigma;
}

std::array<float, 3> Cross(const float* a, const float* b) {
  return {a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]};
}

float DistanceOf(const float* a, const float* b) {
  const float x = a[0] - b[0], y = a[1] - b[1], z = a[2] - b[2];
  return std::sqrt(x * x + y * y + z * z + kEps);
}

}  // namespace

MpnnGeometry::MpnnGeometry(const MpnnInput& input, int neighbors)
    : input_(input), k_(static_cast<int>(std::min<int64_t>(neighbors, input.size()))) {
  const int64_t size = input.size();
  atoms_.resize(5 * size * 3);
  neighbor_.resize(size * k_);
  adjusted_.resize(size * k_);
  farthest_.resize(size);
  for (int64_t i = 0; i < size; ++i) {
    const float* backbone = input.xyz.data() + 12 * i;
    for (int atom = 0; atom < 4; ++atom)
      std::copy_n(backbone + 3 * kBackboneOf[atom], 3, atoms_.data() + 3 * (atom * size + i));
    float b[3], c[3];
    for (int axis = 0; axis < 3; ++axis) {
      b[axis] = backbone[3 + axis] - backbone[axis];
      c[axis] = backbone[6 + axis] - backbone[3 + axis];
    }
    const std::array<float, 3> a = Cross(b, c);
    for (int axis = 0; axis < 3; ++axis) {
      atoms_[3 * (kCb * size + i) + axis] =
          kAcross * a[axis] + kAlongB * b[axis] + kAlongC * c[axis] + backbone[3 + axis];
    }
  }
}

void MpnnGeometry::FindNeighbors(int64_t i) {
  const int64_t size = input_.size();
  std::vector<std::pair<float, int32_t>> candidates(size);
  float largest = 0;
  for (int64_t j = 0; j < size; ++j) {
    const bool both = input_.known[i] != 0 && input_.known[j] != 0;
    const float distance = both ? DistanceOf(atoms_.data() + 3 * i, atoms_.data() + 3 * j) : 0;
    candidates[j] = {distance, static_cast<int32_t>(j)};
    if (distance > largest) {
      largest = distance;
      farthest_[i] = static_cast<int32_t>(j);
    }
  }
  for (int64_t j = 0; j < size; ++j) {
    if (input_.known[i] == 0 || input_.known[j] == 0) candidates[j].first = largest;
  }
  std::partial_sort(candidates.begin(), candidates.begin() + k_, candidates.end());
  for (int k = 0; k < k_; ++k) {
    adjusted_[i * k_ + k] = candidates[k].first;
    neighbor_[i * k_ + k] = candidates[k].second;
  }
}

int MpnnGeometry::OffsetOf(int64_t i, int k) const {
  const int32_t j = neighbor_[i * k_ + k];
  if (input_.chain[i] != input_.chain[j]) return kMpnnOffsets - 1;
  const int64_t offset = int64_t{input_.index[i]} - input_.index[j];
  return static_cast<int>(std::clamp<int64_t>(offset + 32, 0, 64));
}

void MpnnGeometry::Features(const graph::Context& ctx, int64_t i, const std::vector<float>& offsets,
                            float* out) const {
  for (int n = 0; n < k_; ++n, out += kMpnnEdgeInputs) {
    std::copy_n(offsets.data() + OffsetOf(i, n) * kMpnnPositional, kMpnnPositional, out);
    Exponents(i, n, out + kMpnnPositional);
    ctx.graph->rows.exp(out + kMpnnPositional, kMpnnEdgeInputs - kMpnnPositional);
  }
}

void MpnnGeometry::Exponents(int64_t i, int k, float* out) const {
  const int64_t size = input_.size(), j = neighbor_[i * k_ + k];
  auto write = [&](float distance) {
    for (int m = 0; m < kMpnnRbf; ++m) {
      const float z = RbfArgument(distance, m);
      *out++ = -(z * z);
    }
  };
  write(adjusted_[i * k_ + k]);
  for (const auto& [a, b] : kPairs)
    write(DistanceOf(atoms_.data() + 3 * (a * size + i), atoms_.data() + 3 * (b * size + j)));
}

void MpnnGeometry::DistanceGradients(int64_t i, int k, const float* grad, EdgeGradients& out) const {
  const int64_t size = input_.size(), j = neighbor_[i * k_ + k];
  out = {};
  // Adds the gradient of the distance of two atoms, from that of its functions.
  auto add = [&](const float* x, const float* y, float* x_grad, float* y_grad) {
    const float distance = DistanceOf(x, y);
    float sum = 0;
    for (int m = 0; m < kMpnnRbf; ++m) {
      const float z = RbfArgument(distance, m);
      sum += *grad++ * -2 * z / kSigma * std::exp(-z * z);
    }
    for (int axis = 0; axis < 3; ++axis) {
      const float along = sum * (x[axis] - y[axis]) / distance;
      x_grad[axis] += along;
      y_grad[axis] -= along;
    }
  };
  // An unknown neighbour has the distance of the farthest known one, that of an unknown position is 0.
  const bool both = input_.known[i] != 0 && input_.known[j] != 0;
  if (both) {
    add(atoms_.data() + 3 * i, atoms_.data() + 3 * j, out.own, out.other);
  } else if (input_.known[i] != 0) {
    add(atoms_.data() + 3 * i, atoms_.data() + 3 * int64_t{farthest_[i]}, out.own, out.farthest);
  } else {
    grad += kMpnnRbf;
  }
  for (const auto& [a, b] : kPairs) {
    add(atoms_.data() + 3 * (a * size + i), atoms_.data() + 3 * (b * size + j), out.own + 3 * a,
        out.other + 3 * b);
  }
}

void MpnnGeometry::AddToAtoms(int64_t i, int k, const EdgeGradients& grads, std::vector<float>& atoms) const {
  const int64_t size = input_.size(), j = neighbor_[i * k_ + k];
  for (int atom = 0; atom < 5; ++atom) {
    for (int axis = 0; axis < 3; ++axis) {
      atoms[3 * (atom * size + i) + axis] += grads.own[3 * atom + axis];
      atoms[3 * (atom * size + j) + axis] += grads.other[3 * atom + axis];
    }
  }
  for (int axis = 0; axis < 3; ++axis) atoms[3 * int64_t{farthest_[i]} + axis] += grads.farthest[axis];
}

void MpnnGeometry::AddToInput(const std::vector<float>& atoms, float* xyz) const {
  const int64_t size = input_.size();
  for (int64_t i = 0; i < size; ++i) {
    float* to = xyz + 12 * i;
    for (int atom = 0; atom < 4; ++atom) {
      for (int axis = 0; axis < 3; ++axis)
        to[3 * kBackboneOf[atom] + axis] += atoms[3 * (atom * size + i) + axis];
    }
    const float *backbone = input_.xyz.data() + 12 * i, *g = atoms.data() + 3 * (kCb * size + i);
    float b[3], c[3];
    for (int axis = 0; axis < 3; ++axis) {
      b[axis] = backbone[3 + axis] - backbone[axis];
      c[axis] = backbone[6 + axis] - backbone[3 + axis];
    }
    // g . (b x c) has the derivatives c x g by b, and g x b by c.
    const std::array<float, 3> from_b = Cross(c, g), from_c = Cross(g, b);
    for (int axis = 0; axis < 3; ++axis) {
      const float b_grad = kAcross * from_b[axis] + kAlongB * g[axis],
                  c_grad = kAcross * from_c[axis] + kAlongC * g[axis];
      to[axis] -= b_grad;
      to[3 + axis] += g[axis] + b_grad - c_grad;
      to[6 + axis] += c_grad;
    }
  }
}

}  // namespace moesaic::science
