// Structure module of AlphaFold 2 (Jumper et al., Nature 596, 2021, supplementary algorithms 20 to 24), with
// the parameter names and the results of OpenFold.
#pragma once

#include "science/invariant_points.h"

namespace moesaic::science {

inline constexpr int kTorsions = 7;     ///< omega, phi, psi, chi1 to chi4
inline constexpr int kRigidGroups = 8;  ///< The backbone, and one group per torsion.
inline constexpr int kAtomsOfResidue = 14;

/// Idealized residues: buffers of OpenFold's module, which its state dict does not hold.
struct ResidueGeometry {
  int types = 0;
  std::vector<float> frames;     ///< [types, 8, 4, 4]: default_frames, of a group in its parent group
  std::vector<int32_t> group;    ///< [types, 14]: group_idx, the rigid group of every atom
  std::vector<float> mask;       ///< [types, 14]: atom_mask, 0 where the type has no such atom
  std::vector<float> positions;  ///< [types, 14, 3]: lit_positions, in the frame of the group

  /// Reads default_frames, group_idx, atom_mask and lit_positions.
  static StatusOr<ResidueGeometry> Load(const WeightScope& weights);
};

/// Results of every iteration; null pointers are not written. Lengths are in angstroms.
struct StructureOutputs {
  float* frames = nullptr;        ///< [blocks, n, 7]: quaternion and translation of the backbone
  float* angles = nullptr;        ///< [blocks, n, 7, 2]: sine and cosine of the torsions
  float* unnormalized = nullptr;  ///< [blocks, n, 7, 2]
  float* groups = nullptr;        ///< [blocks, n, 8, 4, 4]: frames of the rigid groups
  float* positions = nullptr;     ///< [blocks, n, 14, 3]: atoms
  float* single = nullptr;        ///< [n, c_s] after the last iteration
};

/// Gradients of results of every iteration, in the layout of StructureOutputs; a null one is 0. Gradients of
/// the inputs are added to `single` and `pair`; a null one is not computed.
struct StructureGradients {
  const float* frames = nullptr;
  const float* angles = nullptr;
  const float* unnormalized = nullptr;
  const float* groups = nullptr;
  const float* positions = nullptr;
  const float* single_out = nullptr;
  float* single = nullptr;  ///< [n, c_s]
  float* pair = nullptr;    ///< [n, n, c_z]
};

/// Iterations share their weights: invariant point attention, transition, update of the backbone's frames by
/// quaternions, torsion angles, and atoms. The pair features are normalized, and projected to the attention's
/// bias, once for all iterations.
class StructureModule {
 public:
  /// Parameters layer_norm_s, layer_norm_z, linear_in, ipa.*, layer_norm_ipa,
  /// transition.layers.N.linear_{1,2,3}, transition.layer_norm, bb_update.linear and angle_resnet.*. With
  /// ResidueGeometry's buffers it also places atoms.
  static StatusOr<StructureModule> Load(const WeightScope& weights, const InvariantPointOptions& options,
                                        int blocks = 8);
  int c_s() const { return ipa_.c_s(); }
  int c_z() const { return ipa_.c_z(); }
  int blocks() const { return blocks_; }
  bool has_geometry() const { return geometry_.types > 0; }

  /// single is [n, c_s], pair [n, n, c_z], mask [n] or null. types [n] are residue types; they are needed for
  /// groups and positions only.
  Status Run(const graph::Context& ctx, int64_t n, const float* single, const float* pair,
             const int32_t* types, const float* mask, const StructureOutputs& out) const;
  /// Adds gradients to grads.single, grads.pair and `parameters`, which has the names of the state dict. With
  /// stop_rotations, the rotations that an iteration gets from the one before count as constants, as in
  /// algorithm 20 and OpenFold's training. Without it, gradients are those of Run(). The states of all
  /// iterations, two arrays [blocks, n, c_s], are computed first and kept. Hidden values exist for one
  /// iteration at a time.
  Status Backward(const graph::Context& ctx, int64_t n, const float* single, const float* pair,
                  const int32_t* types, const float* mask, bool stop_rotations,
                  const StructureGradients& grads, const GradientMap& parameters) const;

 private:
  struct TransitionLayer {
    Dense first, second, third;
  };
  struct AngleBlock {
    Dense first, second;
  };
  struct Backbone;
  struct Iterations;
  struct BackwardRun;
  Status CheckTypes(int64_t n, const int32_t* types) const;
  // Allocates scratch memory for all iterations and computes their common inputs.
  Iterations Begin(const graph::Context& ctx, int64_t n, const float* single, const float* pair) const;
  // Runs one iteration without angles and atoms. Writes the state after the attention to `attended` [n, c_s]
  // unless it is null.
  Status Iterate(const graph::Context& ctx, const float* mask, Iterations& state,
                 float* attended = nullptr) const;
  void Transit(const graph::Context& ctx, int64_t n, float* s) const;
  void Angles(const graph::Context& ctx, int64_t n, const float* s, const float* initial, float* unnormalized,
              float* angles) const;
  void PlaceAtoms(const graph::Context& ctx, const Backbone& backbone, const float* angles,
                  const int32_t* types, float* groups, float* positions) const;

  int blocks_ = 0;
  InvariantPointAttention ipa_;
  Norm norm_s_, norm_z_, norm_ipa_, norm_transition_;
  Dense in_, backbone_, angle_in_, angle_initial_, angle_out_;
  std::vector<TransitionLayer> transition_;
  std::vector<AngleBlock> angle_blocks_;
  ResidueGeometry geometry_;
};

}  // namespace moesaic::science
