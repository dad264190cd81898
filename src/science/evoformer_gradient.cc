// Backward passes of the transition and of a whole Evoformer block.
#include <algorithm>

#include "science/evoformer.h"
#include "science/run_tasks.h"

namespace moesaic::science {
namespace {

constexpr int64_t kTransitionRows = 2048;  // rows whose hidden values exist at once

}  // namespace

Status Transition::Backward(const graph::Context& ctx, int64_t rows, const float* x, const float* out_grad,
                            float* x_grad, const GradientMap& parameters) const {
  const GradientScope names(parameters);
  ASSIGN_OR_RETURN(const DenseGradients in_grads, DenseGradients::Find(names, "linear_1", in_));
  ASSIGN_OR_RETURN(const DenseGradients out_grads, DenseGradients::Find(names, "linear_2", out_));
  ASSIGN_OR_RETURN(const NormGradients norm_grads, NormGradients::Find(names, "layer_norm", norm_));
  const graph::ScratchScope scope(ctx);
  auto take = [&](int64_t count) { return ctx.exec.scratch->Take<float>(count).data(); };
  const int c = in_.k(), hidden = in_.n();
  const int64_t block = std::min(kTransitionRows, rows);
  float *normal = take(block * c), *values = take(block * hidden), *grad = take(block * hidden);
  const DenseBackward in_backward(in_), out_backward(out_);
  for (int64_t first = 0; first < rows; first += block) {
    const int64_t count = std::min(block, rows - first);
    const float *x_rows = x + first * c, *grad_rows = out_grad + first * c;
    Apply(ctx, norm_, x_rows, count, normal);
    Apply(ctx, in_, normal, c, count, values, hidden);
    Activate(ctx, values, count * hidden, graph::Activation::kRelu);
    AddWeightGradients(ctx, grad_rows, c, c, values, hidden, hidden, count, out_grads);
    out_backward.Inputs(ctx, grad_rows, c, count, grad, hidden);
    ActivationBackward(ctx, values, count * hidden, graph::Activation::kRelu, grad);
    AddWeightGradients(ctx, grad, hidden, hidden, normal, c, c, count, in_grads);
    in_backward.Inputs(ctx, grad, hidden, count, normal, c);
    NormBackward(ctx, norm_, x_rows, normal, count, x_grad == nullptr ? nullptr : x_grad + first * c,
                 norm_grads);
  }
  AddTo(ctx, out_grad, rows * c, x_grad);
  return OkStatus();
}

Status EvoformerBlock::Backward(const graph::Context& ctx, int64_t sequences, int64_t residues,
                                const float* msa_mask, const float* pair_mask, const float* m, const float* z,
                                const EvoformerGradients& grads, const GradientMap& parameters) const {
  const graph::ScratchScope scope(ctx);
  const int64_t m_size = sequences * residues * c_m(), z_size = residues * residues * c_z();
  const int64_t m_rows = sequences * residues, z_rows = residues * residues;
  auto copy = [&](const float* from, int64_t count) {
    float* to = ctx.exec.scratch->Take<float>(count).data();
    std::copy_n(from, count, to);
    return to;
  };
  // The inputs of all layers, of which every one is the result of the layer before.
  float* m_states[4] = {copy(m, m_size)};
  float* z_states[6] = {copy(z, z_size)};
  auto next_m = [&](int i) { return m_states[i] = copy(m_states[i - 1], m_size); };
  auto next_z = [&](int i) { return z_states[i] = copy(z_states[i - 1], z_size); };
  RETURN_IF_ERROR(row_.Run(ctx, sequences, residues, msa_mask, z, next_m(1)));
  RETURN_IF_ERROR(column_.Run(ctx, sequences, residues, msa_mask, nullptr, next_m(2)));
  RETURN_IF_ERROR(msa_transition_.Run(ctx, m_rows, next_m(3)));
  RETURN_IF_ERROR(outer_.Run(ctx, sequences, residues, msa_mask, m_states[3], next_z(1)));
  RETURN_IF_ERROR(outgoing_.Run(ctx, residues, pair_mask, next_z(2)));
  RETURN_IF_ERROR(incoming_.Run(ctx, residues, pair_mask, next_z(3)));
  RETURN_IF_ERROR(starting_.Run(ctx, residues, pair_mask, next_z(4)));
  RETURN_IF_ERROR(ending_.Run(ctx, residues, pair_mask, next_z(5)));

  // A layer reads the gradient of its result and writes that of its input over its result, which is not
  // needed any more.
  const float* z_grad = grads.z_out;
  auto pair_backward = [&](const auto& layer, const char* name, int i) -> Status {
    float* found = i == 5 ? copy(z, z_size) : z_states[i + 1];
    std::fill_n(found, z_size, 0.0F);
    const GradientMap own = GradientsUnder(parameters, name);
    if constexpr (std::is_same_v<std::decay_t<decltype(layer)>, Transition>) {
      RETURN_IF_ERROR(layer.Backward(ctx, z_rows, z_states[i], z_grad, found, own));
    } else {
      RETURN_IF_ERROR(layer.Backward(ctx, residues, pair_mask, z_states[i], z_grad, found, own));
    }
    z_grad = found;
    return OkStatus();
  };
  RETURN_IF_ERROR(pair_backward(pair_transition_, "pair_transition", 5));
  RETURN_IF_ERROR(pair_backward(ending_, "tri_att_end", 4));
  RETURN_IF_ERROR(pair_backward(starting_, "tri_att_start", 3));
  RETURN_IF_ERROR(pair_backward(incoming_, "tri_mul_in", 2));
  RETURN_IF_ERROR(pair_backward(outgoing_, "tri_mul_out", 1));
  // The outer product mean adds to z: the gradient of its pair input is that of its result.
  AddTo(ctx, z_grad, z_size, grads.z);
  float* m_grad = copy(grads.m_out, m_size);
  RETURN_IF_ERROR(outer_.Backward(ctx, sequences, residues, msa_mask, m_states[3], z_grad, m_grad,
                                  GradientsUnder(parameters, "outer_product_mean")));
  auto cleared = [&](float* x) {
    std::fill_n(x, m_size, 0.0F);
    return x;
  };
  float* transition_grad = cleared(m_states[3]);
  RETURN_IF_ERROR(msa_transition_.Backward(ctx, m_rows, m_states[2], m_grad, transition_grad,
                                           GradientsUnder(parameters, "msa_transition")));
  float* column_grad = cleared(m_states[2]);
  RETURN_IF_ERROR(column_.Backward(ctx, sequences, residues, msa_mask, nullptr, m_states[1], transition_grad,
                                   nullptr, column_grad, GradientsUnder(parameters, "msa_att_col")));
  return row_.Backward(ctx, sequences, residues, msa_mask, z, m_states[0], column_grad, grads.z, grads.m,
                       GradientsUnder(parameters, "msa_att_row"));
}

}  // namespace moesaic::science
