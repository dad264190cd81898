// The backward pass of the structure module.
#include "science/run_tasks.h"
#include "science/structure_module_state.h"

namespace moesaic::science {
namespace {

// A linear layer's backward pass, and the arrays of its parameters' gradients.
struct LinearPass {
  DenseBackward backward;
  DenseGradients grads;

  static StatusOr<LinearPass> Find(const GradientScope& scope, const std::string& name, const Dense& dense) {
    ASSIGN_OR_RETURN(const DenseGradients grads, DenseGradients::Find(scope, name, dense));
    return LinearPass{DenseBackward(dense), grads};
  }
  // x [rows, k] is the layer's input; x_grad is written, or added to with accumulate.
  void Run(const graph::Context& ctx, int64_t rows, const float* x, const float* y_grad, float* x_grad,
           bool accumulate = false) const {
    const int n = backward.n(), k = backward.k();
    AddWeightGradients(ctx, y_grad, n, n, x, k, k, rows, grads);
    backward.Inputs(ctx, y_grad, n, rows, x_grad, k, accumulate);
  }
};

// The gradient of a quaternion from that of its rotation [9].
std::array<float, 4> QuaternionGradient(const float* q, const float* g) {
  const float w = q[0], x = q[1], y = q[2], z = q[3];
  return {2 * (w * (g[0] + g[4] + g[8]) + z * (g[3] - g[1]) + y * (g[2] - g[6]) + x * (g[7] - g[5])),
          2 * (x * (g[0] - g[4] - g[8]) + y * (g[1] + g[3]) + z * (g[2] + g[6]) + w * (g[7] - g[5])),
          2 * (y * (g[4] - g[0] - g[8]) + x * (g[1] + g[3]) + z * (g[5] + g[7]) + w * (g[2] - g[6])),
          2 * (z * (g[8] - g[0] - g[4]) + x * (g[2] + g[6]) + y * (g[5] + g[7]) + w * (g[3] - g[1]))};
}

// Gradients of a parent's frame and of a group's frame in it, from that of the composed frame.
void ComposedGradient(const Rigid& parent, const Rigid& group, const Rigid& grad, Rigid& parent_grad,
                      std::array<float, 9>& group_grad) {
  for (int row = 0; row < 3; ++row) {
    parent_grad.t[row] += grad.t[row];
    for (int column = 0; column < 3; ++column) {
      float sum = grad.t[row] * group.t[column], turned = 0;
      for (int k = 0; k < 3; ++k) {
        sum += grad.r[3 * row + k] * group.r[3 * column + k];
        turned += parent.r[3 * k + row] * grad.r[3 * k + column];
      }
      parent_grad.r[3 * row + column] += sum;
      group_grad[3 * row + column] = turned;
    }
  }
}

constexpr Rigid kNoGradient = {.r = {}, .t = {}};

}  // namespace

struct StructureModule::BackwardRun {
  const StructureModule& module;
  const graph::Context& ctx;
  const int64_t n;
  const StructureGradients& grads;
  const bool stop_rotations;

  struct Transition {
    LinearPass first, second, third;
  };
  struct Angle {
    LinearPass first, second;
  };
  std::vector<Transition> transition{};
  std::vector<Angle> angle_blocks{};
  std::vector<LinearPass> linear{};  // linear_in, bb_update, and the angles' linear_in, _initial and _out
  NormGradients norm_s{}, norm_z{}, norm_ipa{}, norm_transition{};
  GradientMap ipa{};

  // Gradients of the state and the frames between iterations, and of the normalized inputs.
  float *s = nullptr, *initial = nullptr, *z = nullptr;        // [n, c_s] twice and [n, n, c_z] or null
  std::vector<float> quaternion{}, rotation{}, translation{};  // [n, 4], [n, 9], [n, 3]

  float* Take(int64_t count) const { return ctx.exec.scratch->Take<float>(count).data(); }
  float* Zeros(int64_t count) const {
    float* x = Take(count);
    std::fill_n(x, count, 0.0F);
    return x;
  }

  Status Find(const GradientMap& parameters) {
    const GradientScope names(parameters);
    const GradientScope of_angles = names.Under("angle_resnet"), of_transition = names.Under("transition");
    const std::tuple<GradientScope, const char*, const Dense*> layers[] = {
        {names, "linear_in", &module.in_},
        {names, "bb_update.linear", &module.backbone_},
        {of_angles, "linear_in", &module.angle_in_},
        {of_angles, "linear_initial", &module.angle_initial_},
        {of_angles, "linear_out", &module.angle_out_}};
    for (const auto& [scope, name, dense] : layers) {
      ASSIGN_OR_RETURN(LinearPass found, LinearPass::Find(scope, name, *dense));
      linear.push_back(std::move(found));
    }
    for (size_t i = 0; i < module.transition_.size(); ++i) {
      const GradientScope scope = of_transition.Under(fmt::format("layers.{}", i));
      const TransitionLayer& layer = module.transition_[i];
      ASSIGN_OR_RETURN(LinearPass first, LinearPass::Find(scope, "linear_1", layer.first));
      ASSIGN_OR_RETURN(LinearPass second, LinearPass::Find(scope, "linear_2", layer.second));
      ASSIGN_OR_RETURN(LinearPass third, LinearPass::Find(scope, "linear_3", layer.third));
      transition.push_back({std::move(first), std::move(second), std::move(third)});
    }
    for (size_t i = 0; i < module.angle_blocks_.size(); ++i) {
      const GradientScope scope = of_angles.Under(fmt::format("layers.{}", i));
      ASSIGN_OR_RETURN(LinearPass first, LinearPass::Find(scope, "linear_1", module.angle_blocks_[i].first));
      ASSIGN_OR_RETURN(LinearPass second,
                       LinearPass::Find(scope, "linear_2", module.angle_blocks_[i].second));
      angle_blocks.push_back({std::move(first), std::move(second)});
    }
    ASSIGN_OR_RETURN(norm_s, NormGradients::Find(names, "layer_norm_s", module.norm_s_));
    ASSIGN_OR_RETURN(norm_z, NormGradients::Find(names, "layer_norm_z", module.norm_z_));
    ASSIGN_OR_RETURN(norm_ipa, NormGradients::Find(names, "layer_norm_ipa", module.norm_ipa_));
    ASSIGN_OR_RETURN(norm_transition,
                     NormGradients::Find(of_transition, "layer_norm", module.norm_transition_));
    ipa = GradientsUnder(parameters, "ipa");
    return OkStatus();
  }

  // Adds the gradients of the angles [n, 7, 2] and the frames for those of groups and atoms.
  void PlacedAtoms(int block, const Backbone& backbone, const float* angles, const int32_t* types,
                   float* angles_grad) {
    const ResidueGeometry& geometry = module.geometry_;
    const int64_t plane = block * n;
    ForRows(ctx, n, 64, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        Rigid root, global[kRigidGroups], group[kRigidGroups], grad[kRigidGroups], root_grad = kNoGradient;
        std::copy_n(backbone.rotation.data() + 9 * i, 9, root.r.data());
        for (int axis = 0; axis < 3; ++axis) root.t[axis] = kAngstroms * backbone.translation[3 * i + axis];
        const float* frames = geometry.frames.data() + int64_t{types[i]} * kRigidGroups * 16;
        const float* torsions = angles + i * kTorsions * 2;
        for (int g = 0; g < kRigidGroups; ++g) {
          group[g] = TurnedGroup(frames + 16 * g, g == 0 ? 0 : torsions[2 * g - 2],
                                 g == 0 ? 1 : torsions[2 * g - 1]);
          global[g] = Composed(g >= kChi2 ? global[g - 1] : root, group[g]);
          grad[g] = grads.groups == nullptr
                        ? kNoGradient
                        : FromMatrix(grads.groups + ((plane + i) * kRigidGroups + g) * 16);
        }
        for (int a = 0; a < kAtomsOfResidue && grads.positions != nullptr; ++a) {
          const int64_t atom = int64_t{types[i]} * kAtomsOfResidue + a;
          const float* at = grads.positions + ((plane + i) * kAtomsOfResidue + a) * 3;
          Rigid& to = grad[geometry.group[atom]];
          for (int row = 0; row < 3; ++row) {
            const float x = geometry.mask[atom] * at[row];
            to.t[row] += x;
            for (int column = 0; column < 3; ++column)
              to.r[3 * row + column] += x * geometry.positions[3 * atom + column];
          }
        }
        for (int g = kRigidGroups; g-- > 0;) {
          const bool chained = g >= kChi2;
          std::array<float, 9> group_grad;
          ComposedGradient(chained ? global[g - 1] : root, group[g], grad[g],
                           chained ? grad[g - 1] : root_grad, group_grad);
          if (g == 0) continue;
          // Through the turn around x: columns 1 and 2 of frame * turn.
          float sine = 0, cosine = 0;
          for (int k = 0; k < 3; ++k) {
            const float* frame = frames + 16 * g + 4 * k;
            cosine += frame[1] * group_grad[3 * k + 1] + frame[2] * group_grad[3 * k + 2];
            sine += frame[2] * group_grad[3 * k + 1] - frame[1] * group_grad[3 * k + 2];
          }
          angles_grad[(i * kTorsions + g - 1) * 2] += sine;
          angles_grad[(i * kTorsions + g - 1) * 2 + 1] += cosine;
        }
        for (int k = 0; k < 9; ++k) rotation[9 * i + k] += root_grad.r[k];
        for (int axis = 0; axis < 3; ++axis) translation[3 * i + axis] += kAngstroms * root_grad.t[axis];
      }
    });
  }

  // Adds the gradients of the results of one iteration: to s, `initial` and the frames.
  void Results(int block, const float* state, const float* initial_state, const Backbone& backbone,
               const int32_t* types) {
    const graph::ScratchScope scope(ctx);
    const int hidden = module.angle_in_.n(), c = module.c_s();
    const int64_t torsions = n * kTorsions * 2, at = block * torsions;
    for (int64_t i = 0; i < n && grads.frames != nullptr; ++i) {
      const float* frame = grads.frames + (block * n + i) * 7;
      for (int k = 0; k < 4; ++k) quaternion[4 * i + k] += frame[k];
      for (int axis = 0; axis < 3; ++axis) translation[3 * i + axis] += kAngstroms * frame[4 + axis];
    }
    const bool atoms = grads.groups != nullptr || grads.positions != nullptr;
    if (!atoms && grads.angles == nullptr && grads.unnormalized == nullptr) return;
    // Rectified values before each layer, computed again.
    auto rectified = [&](const float* x, int64_t count) {
      float* to = Take(count);
      Activate(ctx, x, count, graph::Activation::kRelu, to);
      return to;
    };
    float *s_in = rectified(state, n * c), *initial_in = rectified(initial_state, n * c),
          *x = Take(n * hidden);
    Apply(ctx, module.angle_initial_, initial_in, c, n, x, hidden);
    Apply(ctx, module.angle_in_, s_in, c, n, x, hidden, true);
    std::vector<std::pair<float*, float*>> inner;  // inputs of a block's layers
    for (const AngleBlock& layers : module.angle_blocks_) {
      inner.emplace_back(rectified(x, n * hidden), Take(n * hidden));
      Apply(ctx, layers.first, inner.back().first, hidden, n, inner.back().second, hidden);
      Activate(ctx, inner.back().second, n * hidden, graph::Activation::kRelu);
      Apply(ctx, layers.second, inner.back().second, hidden, n, x, hidden, true);
    }
    float *last = rectified(x, n * hidden), *raw = Take(torsions), *angles = Take(torsions),
          *angles_grad = Zeros(torsions);
    Apply(ctx, module.angle_out_, last, hidden, n, raw, 2 * kTorsions);
    NormalizeAngles(n, raw, angles);
    if (grads.angles != nullptr) AddTo(ctx, grads.angles + at, torsions, angles_grad);
    if (atoms) PlacedAtoms(block, backbone, angles, types, angles_grad);
    for (int64_t i = 0; i < torsions; i += 2) {
      const float squared = raw[i] * raw[i] + raw[i + 1] * raw[i + 1];
      // A length below the least one is a constant.
      const float along =
          squared < kAngleEps ? 0 : angles[i] * angles_grad[i] + angles[i + 1] * angles_grad[i + 1];
      const float norm = std::sqrt(std::max(squared, kAngleEps));
      for (const int64_t k : {i, i + 1}) angles_grad[k] = (angles_grad[k] - along * angles[k]) / norm;
    }
    if (grads.unnormalized != nullptr) AddTo(ctx, grads.unnormalized + at, torsions, angles_grad);
    float *x_grad = Take(n * hidden), *a = Take(n * hidden), *b = Take(n * hidden), *to_inputs = Take(n * c);
    linear[4].Run(ctx, n, last, angles_grad, x_grad);
    ActivationBackward(ctx, last, n * hidden, graph::Activation::kRelu, x_grad);
    for (size_t i = angle_blocks.size(); i-- > 0;) {
      angle_blocks[i].second.Run(ctx, n, inner[i].second, x_grad, a);
      ActivationBackward(ctx, inner[i].second, n * hidden, graph::Activation::kRelu, a);
      angle_blocks[i].first.Run(ctx, n, inner[i].first, a, b);
      ActivationBackward(ctx, inner[i].first, n * hidden, graph::Activation::kRelu, b);
      AddTo(ctx, b, n * hidden, x_grad);
    }
    for (const bool of_initial : {false, true}) {
      const float* in = of_initial ? initial_in : s_in;
      linear[of_initial ? 3 : 2].Run(ctx, n, in, x_grad, to_inputs);
      ActivationBackward(ctx, in, n * c, graph::Activation::kRelu, to_inputs);
      AddTo(ctx, to_inputs, n * c, of_initial ? initial : s);
    }
  }

  // Turns the gradients of the frames after an iteration into those before it, and computes those of their
  // update [n, 6].
  void FrameUpdate(const Backbone& before, const Backbone& after, const float* update, float* update_grad) {
    for (int64_t i = 0; i < n; ++i) {
      const float *q = before.quaternion.data() + 4 * i, *r = before.rotation.data() + 9 * i,
                  *unit = after.quaternion.data() + 4 * i, *u = update + 6 * i;
      float *q_grad = quaternion.data() + 4 * i, *r_grad = rotation.data() + 9 * i,
            *t_grad = translation.data() + 3 * i, *to = update_grad + 6 * i;
      const std::array<float, 4> from_rotation = QuaternionGradient(unit, r_grad);
      const float w = q[0], x = q[1], y = q[2], z = q[3];
      const float product[4] = {w - x * u[0] - y * u[1] - z * u[2], x + w * u[0] + y * u[2] - z * u[1],
                                y + w * u[1] + z * u[0] - x * u[2], z + w * u[2] + x * u[1] - y * u[0]};
      float squared = 0, along = 0, d[4];
      for (int k = 0; k < 4; ++k) {
        d[k] = q_grad[k] + from_rotation[k];
        squared += product[k] * product[k];
        along += d[k] * unit[k];
      }
      for (int k = 0; k < 4; ++k) d[k] = (d[k] - along * unit[k]) / std::sqrt(squared);
      to[0] = -x * d[0] + w * d[1] + z * d[2] - y * d[3];
      to[1] = -y * d[0] - z * d[1] + w * d[2] + x * d[3];
      to[2] = -z * d[0] + y * d[1] - x * d[2] + w * d[3];
      const Vec3 shift = TurnedBack(r, {t_grad[0], t_grad[1], t_grad[2]});
      std::copy_n(shift.data(), 3, to + 3);
      const float q_before[4] = {
          d[0] + u[0] * d[1] + u[1] * d[2] + u[2] * d[3], -u[0] * d[0] + d[1] - u[2] * d[2] + u[1] * d[3],
          -u[1] * d[0] + u[2] * d[1] + d[2] - u[0] * d[3], -u[2] * d[0] - u[1] * d[1] + u[0] * d[2] + d[3]};
      for (int k = 0; k < 4; ++k) q_grad[k] = stop_rotations ? 0 : q_before[k];
      for (int row = 0; row < 3; ++row) {
        for (int column = 0; column < 3; ++column)
          r_grad[3 * row + column] = stop_rotations ? 0 : t_grad[row] * u[3 + column];
      }
    }
  }

  // s, the gradient of the transition's result, becomes that of its input `state` [n, c_s].
  void Transit(const float* state) const {
    const graph::ScratchScope scope(ctx);
    const int c = module.c_s();
    const int64_t size = n * c;
    struct Values {
      float *in, *first, *second;
    };
    std::vector<Values> values;
    float* x = Take(size);
    std::copy_n(state, size, x);
    for (const TransitionLayer& layer : module.transition_) {
      values.push_back({x, Take(size), Take(size)});
      const Values& v = values.back();
      Apply(ctx, layer.first, v.in, c, n, v.first, c);
      Activate(ctx, v.first, size, graph::Activation::kRelu);
      Apply(ctx, layer.second, v.first, c, n, v.second, c);
      Activate(ctx, v.second, size, graph::Activation::kRelu);
      x = Take(size);
      std::copy_n(v.in, size, x);
      Apply(ctx, layer.third, v.second, c, n, x, c, true);
    }
    float *grad = Zeros(size), *a = Take(size), *b = Take(size);
    NormBackward(ctx, module.norm_transition_, x, s, n, grad, norm_transition);
    for (size_t i = values.size(); i-- > 0;) {
      const Values& v = values[i];
      transition[i].third.Run(ctx, n, v.second, grad, a);
      ActivationBackward(ctx, v.second, size, graph::Activation::kRelu, a);
      transition[i].second.Run(ctx, n, v.first, a, b);
      ActivationBackward(ctx, v.first, size, graph::Activation::kRelu, b);
      transition[i].first.Run(ctx, n, v.in, b, grad, true);
    }
    std::copy_n(grad, size, s);
  }

  // Turns the gradients after an iteration into those before it. `state` and `before` belong to its begin,
  // `attended` to the state after attention, `next`, `after` and `update` to its end.
  Status Iteration(const float* pair, const float* mask, const float* state, const float* attended,
                   const float* next, const Backbone& before, const Backbone& after, const float* update) {
    const graph::ScratchScope scope(ctx);
    const int c = module.c_s();
    const int64_t size = n * c;
    float *update_grad = Take(6 * n), *normal = Take(size), *attended_grad = Zeros(size);
    FrameUpdate(before, after, update, update_grad);
    linear[1].Run(ctx, n, next, update_grad, s, true);
    Apply(ctx, module.norm_ipa_, attended, n, normal);
    Transit(normal);
    NormBackward(ctx, module.norm_ipa_, attended, s, n, attended_grad, norm_ipa);
    std::copy_n(attended_grad, size, s);
    return module.ipa_.Backward(ctx, n, state, pair, {before.rotation.data(), before.translation.data()},
                                mask, attended_grad,
                                {.s = s,
                                 .z = z,
                                 .rotation = stop_rotations ? nullptr : rotation.data(),
                                 .translation = translation.data()},
                                ipa);
  }
};

Status StructureModule::Backward(const graph::Context& ctx, int64_t n, const float* single, const float* pair,
                                 const int32_t* types, const float* mask, bool stop_rotations,
                                 const StructureGradients& grads, const GradientMap& parameters) const {
  if (grads.groups != nullptr || grads.positions != nullptr) RETURN_IF_ERROR(CheckTypes(n, types));
  BackwardRun run{*this, ctx, n, grads, stop_rotations};
  RETURN_IF_ERROR(run.Find(parameters));
  if (n == 0) return OkStatus();
  const graph::ScratchScope scope(ctx);
  const int c = c_s();
  const int64_t size = n * c, z_size = n * n * c_z();
  // The states at the begin of every iteration and at the end, and those after attention.
  Iterations state = Begin(ctx, n, single, pair);
  float *states = run.Take((blocks_ + 1) * size), *attended = run.Take(blocks_ * size),
        *updates = run.Take(blocks_ * 6 * n);
  std::vector<Backbone> backbones;
  for (int block = 0; block < blocks_; ++block) {
    std::copy_n(state.s, size, states + block * size);
    backbones.push_back(state.backbone);
    RETURN_IF_ERROR(Iterate(ctx, mask, state, attended + block * size));
    std::copy_n(state.update, 6 * n, updates + block * 6 * n);
  }
  std::copy_n(state.s, size, states + blocks_ * size);
  backbones.push_back(state.backbone);

  run.s = run.Zeros(size);
  run.initial = run.Zeros(size);
  if (grads.pair != nullptr || run.norm_z.gamma != nullptr || run.norm_z.beta != nullptr)
    run.z = run.Zeros(z_size);
  run.quaternion.resize(4 * n);
  run.rotation.resize(9 * n);
  run.translation.resize(3 * n);
  if (grads.single_out != nullptr) std::copy_n(grads.single_out, size, run.s);
  for (int block = blocks_; block-- > 0;) {
    const float* next = states + (block + 1) * size;
    run.Results(block, next, state.initial, backbones[block + 1], types);
    RETURN_IF_ERROR(run.Iteration(state.z, mask, states + block * size, attended + block * size, next,
                                  backbones[block], backbones[block + 1], updates + block * 6 * n));
  }
  run.linear[0].Run(ctx, n, state.initial, run.s, run.initial, true);
  NormBackward(ctx, norm_s_, single, run.initial, n, grads.single, run.norm_s);
  if (run.z != nullptr) NormBackward(ctx, norm_z_, pair, run.z, n * n, grads.pair, run.norm_z);
  return OkStatus();
}

}  // namespace moesaic::science
