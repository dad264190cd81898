// Edge features of ProteinMPNN: distances of all pairs of five backbone atoms, and the offset in the chain.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "science/protein/protein_mpnn.h"

namespace moesaic::science {

inline constexpr int kMpnnOffsets = 66;  // 2 * 32 + 1 offsets, and one for other chains
inline constexpr int kMpnnRbf = 16;      // radial basis functions per pair of atoms
inline constexpr int kMpnnAtomPairs = 25;
inline constexpr int kMpnnPositional = 16;  // width of the offset's embedding
inline constexpr int kMpnnEdgeInputs = kMpnnPositional + kMpnnRbf * kMpnnAtomPairs;

/// Geometry of a backbone, from which the features of its edges are computed.
class MpnnGeometry {
 public:
  MpnnGeometry(const MpnnInput& input, int neighbors);
  int64_t size() const { return input_.size(); }
  int neighbors() const { return k_; }
  const std::vector<int32_t>& neighbor() const { return neighbor_; }  // [L, K]

  /// Finds the nearest positions of i by distance of CA, itself included; unknown ones last.
  void FindNeighbors(int64_t i);
  /// Index of the offset's embedding for edge (i, its k-th neighbour).
  int OffsetOf(int64_t i, int k) const;
  /// Writes the inputs [K, kMpnnEdgeInputs] of the embedding of i's edges: embeddings of offsets, from
  /// `offsets` [kMpnnOffsets, kMpnnPositional], and radial basis functions of distances.
  void Features(const graph::Context& ctx, int64_t i, const std::vector<float>& offsets, float* out) const;

  /// Gradients of the atoms of an edge's ends, and of the CA of the position that is farthest from i.
  struct EdgeGradients {
    float own[15], other[15];  // [5, 3]
    float farthest[3];
  };
  /// Computes these gradients from `grad`, the gradient of the edge's 400 radial basis functions.
  void DistanceGradients(int64_t i, int k, const float* grad, EdgeGradients& out) const;
  /// Adds the gradients of an edge to those of all atoms [5][L, 3].
  void AddToAtoms(int64_t i, int k, const EdgeGradients& grads, std::vector<float>& atoms) const;
  /// Adds gradients of atoms to those of the input's coordinates [L, 4, 3].
  void AddToInput(const std::vector<float>& atoms, float* xyz) const;

 private:
  // Writes the 400 squared exponents -((distance - mu) / sigma)^2 of an edge.
  void Exponents(int64_t i, int k, float* out) const;

  const MpnnInput& input_;
  int k_;
  std::vector<float> atoms_;       // [5][L, 3]: CA, N, C, O, CB
  std::vector<int32_t> neighbor_;  // [L, K]
  std::vector<float> adjusted_;    // [L, K]: distance of CA by which neighbours are selected
  std::vector<int32_t>
      farthest_;  // [L]: the known position whose distance counts as that of unknown neighbours
};

}  // namespace moesaic::science
