#include "science/structure_module.h"

#include <algorithm>
#include <cmath>

#include "science/run_tasks.h"
#include "science/structure_module_state.h"

namespace moesaic::science {

StatusOr<ResidueGeometry> ResidueGeometry::Load(const WeightScope& weights) {
  ResidueGeometry geometry;
  ASSIGN_OR_RETURN(const WeightTensor* frames, weights.Get("default_frames", {-1, kRigidGroups, 4, 4}));
  const int64_t types = frames->shape[0];
  ASSIGN_OR_RETURN(const WeightTensor* group, weights.Get("group_idx", {types, kAtomsOfResidue}));
  ASSIGN_OR_RETURN(const WeightTensor* mask, weights.Get("atom_mask", {types, kAtomsOfResidue}));
  ASSIGN_OR_RETURN(const WeightTensor* positions, weights.Get("lit_positions", {types, kAtomsOfResidue, 3}));
  for (size_t i = 0; i < group->values.size(); ++i) {
    const float g = group->values[i];
    if (!(g >= 0 && g < kRigidGroups) || g != std::floor(g)) {
      return InvalidArgument("group_idx[{}, {}] must be a rigid group in [0, {}), but is {}",
                             i / kAtomsOfResidue, i % kAtomsOfResidue, kRigidGroups, g);
    }
    geometry.group.push_back(static_cast<int32_t>(g));
  }
  geometry.types = static_cast<int>(types);
  geometry.frames = frames->values;
  geometry.mask = mask->values;
  geometry.positions = positions->values;
  return geometry;
}

StatusOr<StructureModule> StructureModule::Load(const WeightScope& weights,
                                                const InvariantPointOptions& options, int blocks) {
  if (blocks < 1) return InvalidArgument("a structure module has 1 or more iterations, not {}", blocks);
  StructureModule module;
  module.blocks_ = blocks;
  ASSIGN_OR_RETURN(module.ipa_, InvariantPointAttention::Load(weights.Under("ipa"), options));
  const int c_s = module.c_s();
  ASSIGN_OR_RETURN(module.norm_s_, weights.LayerNorm("layer_norm_s", c_s));
  ASSIGN_OR_RETURN(module.norm_z_, weights.LayerNorm("layer_norm_z", module.c_z()));
  ASSIGN_OR_RETURN(module.norm_ipa_, weights.LayerNorm("layer_norm_ipa", c_s));
  ASSIGN_OR_RETURN(module.in_, weights.Linear("linear_in", c_s, c_s));
  const WeightScope transition = weights.Under("transition");
  ASSIGN_OR_RETURN(module.norm_transition_, transition.LayerNorm("layer_norm", c_s));
  for (int i = 0; transition.Has(fmt::format("layers.{}.linear_1.weight", i)); ++i) {
    const WeightScope scope = transition.Under(fmt::format("layers.{}", i));
    TransitionLayer layer;
    ASSIGN_OR_RETURN(layer.first, scope.Linear("linear_1", c_s, c_s));
    ASSIGN_OR_RETURN(layer.second, scope.Linear("linear_2", c_s, c_s));
    ASSIGN_OR_RETURN(layer.third, scope.Linear("linear_3", c_s, c_s));
    module.transition_.push_back(std::move(layer));
  }
  ASSIGN_OR_RETURN(module.backbone_, weights.Linear("bb_update.linear", 6, c_s));
  const WeightScope angles = weights.Under("angle_resnet");
  ASSIGN_OR_RETURN(module.angle_in_, angles.Linear("linear_in", -1, c_s));
  const int hidden = module.angle_in_.n();
  ASSIGN_OR_RETURN(module.angle_initial_, angles.Linear("linear_initial", hidden, c_s));
  ASSIGN_OR_RETURN(module.angle_out_, angles.Linear("linear_out", 2 * kTorsions, hidden));
  for (int i = 0; angles.Has(fmt::format("layers.{}.linear_1.weight", i)); ++i) {
    const WeightScope scope = angles.Under(fmt::format("layers.{}", i));
    AngleBlock block;
    ASSIGN_OR_RETURN(block.first, scope.Linear("linear_1", hidden, hidden));
    ASSIGN_OR_RETURN(block.second, scope.Linear("linear_2", hidden, hidden));
    module.angle_blocks_.push_back(std::move(block));
  }
  if (weights.Has("default_frames")) {
    ASSIGN_OR_RETURN(module.geometry_, ResidueGeometry::Load(weights));
  }
  return module;
}

Status StructureModule::CheckTypes(int64_t n, const int32_t* types) const {
  if (!has_geometry()) {
    return InvalidArgument(
        "atoms need the tensors default_frames, group_idx, atom_mask and lit_positions among the weights");
  }
  if (types == nullptr) return InvalidArgument("atoms need the types of the residues");
  for (int64_t i = 0; i < n; ++i) {
    if (types[i] < 0 || types[i] >= geometry_.types)
      return InvalidArgument("types[{}] must be in [0, {}), but is {}", i, geometry_.types, types[i]);
  }
  return OkStatus();
}

void StructureModule::Transit(const graph::Context& ctx, int64_t n, float* s) const {
  const graph::ScratchScope scope(ctx);
  const int c = c_s();
  float* a = ctx.exec.scratch->Take<float>(n * c).data();
  float* b = ctx.exec.scratch->Take<float>(n * c).data();
  for (const TransitionLayer& layer : transition_) {
    Apply(ctx, layer.first, s, c, n, a, c);
    Activate(ctx, a, n * c, graph::Activation::kRelu);
    Apply(ctx, layer.second, a, c, n, b, c);
    Activate(ctx, b, n * c, graph::Activation::kRelu);
    Apply(ctx, layer.third, b, c, n, s, c, true);
  }
  Apply(ctx, norm_transition_, s, n, s);
}

void StructureModule::Angles(const graph::Context& ctx, int64_t n, const float* s, const float* initial,
                             float* unnormalized, float* angles) const {
  const graph::ScratchScope scope(ctx);
  const int hidden = angle_in_.n(), c = c_s();
  auto take = [&](int64_t count) { return ctx.exec.scratch->Take<float>(count).data(); };
  float *x = take(n * hidden), *a = take(n * hidden), *b = take(n * hidden), *rectified = take(n * c);
  auto rectify = [&](const float* from, int64_t count, float* to) {
    Activate(ctx, from, count, graph::Activation::kRelu, to);
  };
  rectify(initial, n * c, rectified);
  Apply(ctx, angle_initial_, rectified, c, n, x, hidden);
  rectify(s, n * c, rectified);
  Apply(ctx, angle_in_, rectified, c, n, x, hidden, true);
  for (const AngleBlock& block : angle_blocks_) {
    rectify(x, n * hidden, a);
    Apply(ctx, block.first, a, hidden, n, b, hidden);
    Activate(ctx, b, n * hidden, graph::Activation::kRelu);
    Apply(ctx, block.second, b, hidden, n, x, hidden, true);
  }
  Activate(ctx, x, n * hidden, graph::Activation::kRelu);
  Apply(ctx, angle_out_, x, hidden, n, unnormalized, 2 * kTorsions);
  NormalizeAngles(n, unnormalized, angles);
}

// Algorithm 24.
void StructureModule::PlaceAtoms(const graph::Context& ctx, const Backbone& backbone, const float* angles,
                                 const int32_t* types, float* groups, float* positions) const {
  ForRows(ctx, backbone.size(), 64, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      Rigid global[kRigidGroups];
      std::copy_n(backbone.rotation.data() + 9 * i, 9, global[0].r.data());
      for (int axis = 0; axis < 3; ++axis)
        global[0].t[axis] = kAngstroms * backbone.translation[3 * i + axis];
      const float* frames = geometry_.frames.data() + int64_t{types[i]} * kRigidGroups * 16;
      const Rigid root = global[0];
      for (int g = 0; g < kRigidGroups; ++g) {
        // The backbone's group is not rotated.
        const float sine = g == 0 ? 0 : angles[(i * kTorsions + g - 1) * 2],
                    cosine = g == 0 ? 1 : angles[(i * kTorsions + g - 1) * 2 + 1];
        global[g] = Composed(g >= kChi2 ? global[g - 1] : root, TurnedGroup(frames + 16 * g, sine, cosine));
        if (groups != nullptr) ToMatrix(global[g], groups + (i * kRigidGroups + g) * 16);
      }
      for (int a = 0; a < kAtomsOfResidue && positions != nullptr; ++a) {
        const int64_t atom = int64_t{types[i]} * kAtomsOfResidue + a;
        const std::array<float, 3> at =
            Moved(global[geometry_.group[atom]], geometry_.positions.data() + 3 * atom);
        for (int axis = 0; axis < 3; ++axis)
          positions[(i * kAtomsOfResidue + a) * 3 + axis] = geometry_.mask[atom] * at[axis];
      }
    }
  });
}

StructureModule::Iterations StructureModule::Begin(const graph::Context& ctx, int64_t n, const float* single,
                                                   const float* pair) const {
  auto take = [&](int64_t count) { return ctx.exec.scratch->Take<float>(count).data(); };
  const int c = c_s();
  Iterations state{.n = n,
                   .initial = take(n * c),
                   .s = take(n * c),
                   .update = take(n * std::max(c, 6)),
                   .z = take(n * n * c_z()),
                   .bias = take(ipa_.options().heads * n * n),
                   .backbone = Backbone(n)};
  Apply(ctx, norm_s_, single, n, state.initial);
  Apply(ctx, norm_z_, pair, n * n, state.z);
  ipa_.PairBias(ctx, n, state.z, state.bias);
  Apply(ctx, in_, state.initial, c, n, state.s, c);
  return state;
}

Status StructureModule::Iterate(const graph::Context& ctx, const float* mask, Iterations& state,
                                float* attended) const {
  const int c = c_s();
  const int64_t n = state.n;
  const Frames frames = {state.backbone.rotation.data(), state.backbone.translation.data()};
  RETURN_IF_ERROR(ipa_.Run(ctx, n, state.s, state.z, frames, mask, state.update, state.bias));
  AddTo(ctx, state.update, n * c, state.s);
  if (attended != nullptr) std::copy_n(state.s, n * c, attended);
  Apply(ctx, norm_ipa_, state.s, n, state.s);
  Transit(ctx, n, state.s);
  Apply(ctx, backbone_, state.s, c, n, state.update, 6);
  state.backbone.Update(state.update);
  return OkStatus();
}

Status StructureModule::Run(const graph::Context& ctx, int64_t n, const float* single, const float* pair,
                            const int32_t* types, const float* mask, const StructureOutputs& out) const {
  const bool atoms = out.groups != nullptr || out.positions != nullptr;
  if (atoms) RETURN_IF_ERROR(CheckTypes(n, types));
  if (n == 0) return OkStatus();
  const graph::ScratchScope scope(ctx);
  auto take = [&](int64_t count) { return ctx.exec.scratch->Take<float>(count).data(); };
  const int64_t torsions = n * kTorsions * 2;
  float *unnormalized = take(torsions), *angles = take(torsions);
  Iterations state = Begin(ctx, n, single, pair);
  for (int block = 0; block < blocks_; ++block) {
    RETURN_IF_ERROR(Iterate(ctx, mask, state));
    const Backbone& backbone = state.backbone;
    Angles(ctx, n, state.s, state.initial, unnormalized, angles);
    if (out.unnormalized != nullptr) std::copy_n(unnormalized, torsions, out.unnormalized + block * torsions);
    if (out.angles != nullptr) std::copy_n(angles, torsions, out.angles + block * torsions);
    for (int64_t i = 0; i < n && out.frames != nullptr; ++i) {
      float* frame = out.frames + (block * n + i) * 7;
      std::copy_n(backbone.quaternion.data() + 4 * i, 4, frame);
      for (int axis = 0; axis < 3; ++axis) frame[4 + axis] = kAngstroms * backbone.translation[3 * i + axis];
    }
    if (atoms) {
      PlaceAtoms(ctx, backbone, angles, types,
                 out.groups == nullptr ? nullptr : out.groups + block * n * kRigidGroups * 16,
                 out.positions == nullptr ? nullptr : out.positions + block * n * kAtomsOfResidue * 3);
    }
  }
  if (out.single != nullptr) std::copy_n(state.s, n * c_s(), out.single);
  return OkStatus();
}

}  // namespace moesaic::science
