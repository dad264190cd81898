// Backward passes of triangle attention and of attention over an alignment.
#include <algorithm>

#include "science/axial_attention.h"
#include "science/run_tasks.h"

namespace moesaic::science {
namespace {

constexpr int64_t kAxialRows = 8192;  // rows whose projections exist at once

// Calls body(first, count) for blocks of rows.
template <typename Body>
void ForAxialBlocks(int64_t rows, const Body& body) {
  for (int64_t first = 0; first < rows; first += kAxialRows) body(first, std::min(kAxialRows, rows - first));
}

}  // namespace

Status AxialGradients::Find(const GradientScope& scope, const AxialAttention& attention,
                            const std::string& norm_name) {
  const GradientScope heads = scope.Under("mha");
  ASSIGN_OR_RETURN(q, DenseGradients::Find(heads, "linear_q", attention.mha.q));
  ASSIGN_OR_RETURN(k, DenseGradients::Find(heads, "linear_k", attention.mha.k));
  ASSIGN_OR_RETURN(v, DenseGradients::Find(heads, "linear_v", attention.mha.v));
  ASSIGN_OR_RETURN(gate, DenseGradients::Find(heads, "linear_g", attention.mha.gate));
  ASSIGN_OR_RETURN(out, DenseGradients::Find(heads, "linear_o", attention.mha.out));
  ASSIGN_OR_RETURN(norm, NormGradients::Find(scope, norm_name, attention.norm));
  return OkStatus();
}

void AxialBackward(const graph::Context& ctx, const AxialAttention& p, const float* x, const float* out_grad,
                   const AxialGradients& out) {
  const graph::ScratchScope scope(ctx);
  auto take = [&](int64_t count) { return ctx.exec.scratch->Take<float>(count).data(); };
  const int c = p.c(), width = p.width();
  const int64_t block = std::min(kAxialRows, p.rows());
  float *q = take(p.rows() * width), *k = take(p.rows() * width), *v = take(p.rows() * width),
        *attended = take(p.rows() * width);
  float *normal = take(block * c), *normal_grad = take(block * c), *gate = take(block * width),
        *gated = take(block * width), *gated_grad = take(block * width);
  const struct {
    const Dense& dense;
    const DenseGradients& grads;
    float* values;
  } operands[] = {{p.mha.q, out.q, q}, {p.mha.k, out.k, k}, {p.mha.v, out.v, v}};
  ForAxialBlocks(p.rows(), [&](int64_t first, int64_t count) {
    Apply(ctx, p.norm, x + first * c, count, normal);
    for (const auto& operand : operands)
      Apply(ctx, operand.dense, normal, c, count, operand.values + first * width, width);
  });
  const PairAttentionParams params = p.Params(q, k, v, attended);
  PairAttention(ctx, params);
  // The result's projection and the gate; the gradient of the attended values replaces them.
  const DenseBackward out_backward(p.mha.out), gate_backward(p.mha.gate);
  ForAxialBlocks(p.rows(), [&](int64_t first, int64_t count) {
    const float* grad = out_grad + first * c;
    float* values = attended + first * width;
    Apply(ctx, p.norm, x + first * c, count, normal);
    Apply(ctx, p.mha.gate, normal, c, count, gate, width);
    Activate(ctx, gate, count * width, graph::Activation::kSigmoid);
    out_backward.Inputs(ctx, grad, c, count, gated_grad, width);
    ForRows(ctx, count * width, 1 << 15, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const float g = gate[i], value = values[i];
        gated[i] = value * g;
        values[i] = gated_grad[i] * g;
        gate[i] = gated_grad[i] * value * g * (1 - g);
      }
    });
    AddWeightGradients(ctx, grad, c, c, gated, width, width, count, out.out);
    AddWeightGradients(ctx, gate, width, width, normal, c, c, count, out.gate);
    gate_backward.Inputs(ctx, gate, width, count, normal_grad, c);
    NormBackward(ctx, p.norm, x + first * c, normal_grad, count,
                 out.x == nullptr ? nullptr : out.x + first * c, out.norm);
  });
  PairAttentionBackward(ctx, params, {.out = attended, .q = q, .k = k, .v = v, .bias = out.bias});
  std::vector<DenseBackward> backward;
  for (const auto& operand : operands) backward.emplace_back(operand.dense);
  ForAxialBlocks(p.rows(), [&](int64_t first, int64_t count) {
    Apply(ctx, p.norm, x + first * c, count, normal);
    for (size_t i = 0; i < backward.size(); ++i) {
      const float* grad = operands[i].values + first * width;
      AddWeightGradients(ctx, grad, width, width, normal, c, c, count, operands[i].grads);
      backward[i].Inputs(ctx, grad, width, count, normal_grad, c, i > 0);
    }
    NormBackward(ctx, p.norm, x + first * c, normal_grad, count,
                 out.x == nullptr ? nullptr : out.x + first * c, out.norm);
    for (int64_t i = first * c; i < (first + count) * c && out.x != nullptr; ++i) out.x[i] += out_grad[i];
  });
}

void BiasBackward(const graph::Context& ctx, const Norm& norm, const Dense& linear, const float* x,
                  int64_t rows, const float* out_grad, const DenseGradients& linear_grads,
                  const NormGradients& norm_grads, float* x_grad) {
  const graph::ScratchScope scope(ctx);
  auto take = [&](int64_t count) { return ctx.exec.scratch->Take<float>(count).data(); };
  const int c = linear.k(), heads = linear.n();
  const int64_t block = std::min(kAxialRows, rows);
  float *normal = take(block * c), *normal_grad = take(block * c), *grad = take(block * heads);
  const DenseBackward backward(linear);
  ForAxialBlocks(rows, [&](int64_t first, int64_t count) {
    Apply(ctx, norm, x + first * c, count, normal);
    ctx.graph->rows.transpose(out_grad + first, rows, heads, count, grad, heads);
    AddWeightGradients(ctx, grad, heads, heads, normal, c, c, count, linear_grads);
    backward.Inputs(ctx, grad, heads, count, normal_grad, c);
    NormBackward(ctx, norm, x + first * c, normal_grad, count,
                 x_grad == nullptr ? nullptr : x_grad + first * c, norm_grads);
  });
}

Status TriangleAttention::Backward(const graph::Context& ctx, int64_t n, const float* mask, const float* z,
                                   const float* out_grad, float* z_grad,
                                   const GradientMap& parameters) const {
  const GradientScope names(parameters);
  const graph::ScratchScope scope(ctx);
  const int64_t size = mha_.heads * n * n;
  float *bias = ctx.exec.scratch->Take<float>(size).data(),
        *bias_grad = ctx.exec.scratch->Take<float>(size).data();
  const AxialAttention attention = {mha_, norm_, n, n, ending_, bias, mask};
  AxialGradients grads{.x = z_grad, .bias = bias_grad};
  RETURN_IF_ERROR(grads.Find(names, attention, "layer_norm"));
  ASSIGN_OR_RETURN(const DenseGradients linear_grads, DenseGradients::Find(names, "linear", bias_));
  if (n == 0) return OkStatus();
  std::fill_n(bias_grad, size, 0.0F);
  SquareBias(ctx, n, z, bias);
  AxialBackward(ctx, attention, z, out_grad, grads);
  if (ending_) TransposeSquares(ctx, mha_.heads, n, bias_grad);
  BiasBackward(ctx, norm_, bias_, z, n * n, bias_grad, linear_grads, grads.norm, z_grad);
  return OkStatus();
}

Status MsaAttention::Backward(const graph::Context& ctx, int64_t sequences, int64_t residues,
                              const float* mask, const float* z, const float* m, const float* out_grad,
                              float* z_grad, float* m_grad, const GradientMap& parameters) const {
  const bool row = !bias_.empty();
  if (row && z == nullptr && residues > 0) return InvalidArgument("row attention needs pair features");
  const GradientScope names(parameters);
  const graph::ScratchScope scope(ctx);
  const int64_t size = row ? mha_.heads * residues * residues : 0;
  float *bias = row ? ctx.exec.scratch->Take<float>(size).data() : nullptr,
        *bias_grad = row ? ctx.exec.scratch->Take<float>(size).data() : nullptr;
  const AxialAttention attention = {mha_, norm_, sequences, residues, !row, bias, mask};
  AxialGradients grads{.x = m_grad, .bias = bias_grad};
  RETURN_IF_ERROR(grads.Find(names, attention, "layer_norm_m"));
  DenseGradients linear_grads;
  NormGradients norm_grads;
  if (row) {
    ASSIGN_OR_RETURN(linear_grads, DenseGradients::Find(names, "linear_z", bias_));
    ASSIGN_OR_RETURN(norm_grads, NormGradients::Find(names, "layer_norm_z", norm_z_));
  }
  if (sequences == 0 || residues == 0) return OkStatus();
  std::fill_n(bias_grad, size, 0.0F);
  if (row) ComputeBias(ctx, norm_z_, bias_, z, residues * residues, bias);
  AxialBackward(ctx, attention, m, out_grad, grads);
  if (row)
    BiasBackward(ctx, norm_z_, bias_, z, residues * residues, bias_grad, linear_grads, norm_grads, z_grad);
  return OkStatus();
}

}  // namespace moesaic::science
