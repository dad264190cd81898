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
  constexpr int kBackboneOf[] = {1, 0, 2, 3};  // of kCa, kN, kC, kO
  for (int64_t i = 0; i < size; ++i) {
    const float* backbone = input.xyz.data() + 12 * i;
    for (int atom = 0; atom < 4; ++atom)
      std::copy_n(backbone + 3 * kBackboneOf[atom], 3, atoms_.data() + 3 * (atom * size + i));
    float b[3], c[3];
    for (int axis = 0; axis < 3; ++axis) {
      b[axis] = backbone[3 + axis] - backbone[axis];
      c[axis] = backbone[6 + axis] - backbone[3 + axis];
    }
    const float a[3] = {b[1] * c[2] - b[2] * c[1], b[2] * c[0] - b[0] * c[2], b[0] * c[1] - b[1] * c[0]};
    // The position of CB in an ideal residue, from N, CA and C.
    for (int axis = 0; axis < 3; ++axis) {
      atoms_[3 * (kCb * size + i) + axis] =
          -0.58273431F * a[axis] + 0.56802827F * b[axis] - 0.54067466F * c[axis] + backbone[3 + axis];
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
    largest = std::max(largest, distance);
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

void MpnnGeometry::Exponents(int64_t i, int k, float* out) const {
  const int64_t size = input_.size(), j = neighbor_[i * k_ + k];
  constexpr float kMin = 2, kMax = 22, kSigma = (kMax - kMin) / kMpnnRbf;
  auto write = [&](float distance) {
    for (int m = 0; m < kMpnnRbf; ++m) {
      const float z = (distance - (kMin + (kMax - kMin) * static_cast<float>(m) / (kMpnnRbf - 1))) / kSigma;
      *out++ = -(z * z);
    }
  };
  write(adjusted_[i * k_ + k]);
  for (const auto& [a, b] : kPairs)
    write(DistanceOf(atoms_.data() + 3 * (a * size + i), atoms_.data() + 3 * (b * size + j)));
}

}  // namespace moesaic::science
