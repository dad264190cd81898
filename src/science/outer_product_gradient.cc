// The backward pass of the outer product mean.
#include <algorithm>

#include "science/axial_attention.h"
#include "science/outer_product.h"
#include "science/run_tasks.h"

namespace moesaic::science {
namespace {

// Parts of the residues i with sums of their own, which are added in order: results do not depend on the
// number of threads.
constexpr int64_t kOuterParts = 8;
constexpr int64_t kOuterRows = 8192;  // rows of m whose projections exist at once

// Sums of one part.
struct OuterSums {
  float *weight, *bias, *b;  // [c_z, c * c], [c_z] and [sequence, residue, c]
};

// Buffers of one worker. A tile has kOuterTile pairs.
struct OuterBuffers {
  float *products, *rows, *update;  // [tile, c, c] twice and [tile, c_z]
  float* transposed;                // [c_z, tile]
  float* own;                       // [sequence, c]: a of one residue
};

}  // namespace

Status OuterProductMean::Backward(const graph::Context& ctx, int64_t sequences, int64_t residues,
                                  const float* mask, const float* m, const float* out_grad, float* m_grad,
                                  const GradientMap& parameters) const {
  const GradientScope names(parameters);
  ASSIGN_OR_RETURN(const DenseGradients a_grads, DenseGradients::Find(names, "linear_1", a_));
  ASSIGN_OR_RETURN(const DenseGradients b_grads, DenseGradients::Find(names, "linear_2", b_));
  ASSIGN_OR_RETURN(const DenseGradients out_grads, DenseGradients::Find(names, "linear_out", out_));
  ASSIGN_OR_RETURN(const NormGradients norm_grads, NormGradients::Find(names, "layer_norm", norm_));
  const int64_t c = a_.n(), c_m = a_.k(), c_z = out_.n(), square = c * c, rows = sequences * residues;
  if (rows == 0) return OkStatus();
  const graph::ScratchScope scope(ctx);
  auto take = [&](int64_t count) { return ctx.exec.scratch->Take<float>(count).data(); };
  auto zeros = [&](int64_t count) {
    float* x = take(count);
    std::fill_n(x, count, 0.0F);
    return x;
  };
  const Operands operands = Project(ctx, sequences, residues, mask, m);
  float* a_values = zeros(rows * c);  // gradient of a, in its layout
  const int64_t parts = std::min(kOuterParts, residues);
  std::vector<OuterSums> sums;
  for (int64_t part = 0; part < parts; ++part)
    sums.push_back({zeros(c_z * square), zeros(c_z), zeros(rows * c)});
  std::vector<OuterBuffers> buffers;
  for (int w = 0; w < ctx.exec.pool->size(); ++w) {
    buffers.push_back({take(kOuterTile * square), take(kOuterTile * square), take(kOuterTile * c_z),
                       take(kOuterTile * c_z), take(sequences * c)});
  }
  const DenseBackward out_backward(out_);
  ctx.exec.pool->Run(parts, [&](int64_t part, int worker) {
    const OuterBuffers& tile = buffers[worker];
    const graph::RowKernels& kernels = ctx.graph->rows;
    for (int64_t i = part * residues / parts; i < (part + 1) * residues / parts; ++i) {
      kernels.transpose(operands.a + i * c * sequences, sequences, c, sequences, tile.own, c);
      for (int64_t first = 0; first < residues; first += kOuterTile) {
        const int64_t count = std::min(kOuterTile, residues - first);
        for (int64_t j = 0; j < count; ++j) {
          const float* from = out_grad + (i * residues + first + j) * c_z;
          const float scale = operands.Weight(i, first + j);
          for (int64_t k = 0; k < c_z; ++k) tile.update[j * c_z + k] = scale * from[k];
          ctx.exec.kernels->axpy(1, tile.update + j * c_z, static_cast<int>(c_z), sums[part].bias);
        }
        if (out_grads.weight != nullptr) {
          operands.Products(ctx, i, first, count, tile.products, tile.rows);
          kernels.transpose(tile.update, c_z, count, c_z, tile.transposed, kOuterTile);
          kernels.matmul({.a = tile.transposed,
                          .b = tile.rows,
                          .c = sums[part].weight,
                          .a_stride = kOuterTile,
                          .b_stride = square,
                          .c_stride = square,
                          .m = c_z,
                          .n = square,
                          .k = count,
                          .accumulate = true});
        }
        kernels.matmul({.a = tile.update,
                        .b = out_backward.weight(),
                        .c = tile.rows,
                        .a_stride = c_z,
                        .b_stride = square,
                        .c_stride = square,
                        .m = count,
                        .n = square,
                        .k = c_z});
        for (int64_t j = 0; j < count; ++j) {  // [j, c, c] to [c, j, c]
          for (int64_t channel = 0; channel < c; ++channel)
            std::copy_n(tile.rows + (j * c + channel) * c, c, tile.products + (channel * count + j) * c);
        }
        kernels.matmul({.a = tile.products,
                        .b = operands.b + first * c,
                        .c = a_values + i * c * sequences,
                        .a_stride = count * c,
                        .b_stride = residues * c,
                        .c_stride = sequences,
                        .m = c,
                        .n = sequences,
                        .k = count * c,
                        .accumulate = true,
                        .b_transposed = true});
        kernels.matmul({.a = tile.own,
                        .b = tile.products,
                        .c = sums[part].b + first * c,
                        .a_stride = c,
                        .b_stride = count * c,
                        .c_stride = residues * c,
                        .m = sequences,
                        .n = count * c,
                        .k = c,
                        .accumulate = true});
      }
    }
  });
  // All parts are added to the first one, and to the gradients of linear_out.
  for (int64_t part = 0; part < parts; ++part) {
    AddTo(ctx, sums[part].weight, c_z * square, out_grads.weight);
    AddTo(ctx, sums[part].bias, c_z, out_grads.bias);
    if (part > 0) AddTo(ctx, sums[part].b, rows * c, sums[0].b);
  }
  const int64_t block = std::min(kOuterRows, rows);
  float *normal = take(block * c_m), *normal_grad = take(block * c_m), *a_grad = take(block * c);
  const DenseBackward a_backward(a_), b_backward(b_);
  for (int64_t first = 0; first < rows; first += block) {
    const int64_t count = std::min(block, rows - first);
    float* b_grad = sums[0].b + first * c;
    ForRows(ctx, count, 256, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const int64_t row = first + r, s = row / residues, i = row % residues;
        const float scale = mask == nullptr ? 1 : mask[row];
        for (int64_t k = 0; k < c; ++k) {
          a_grad[r * c + k] = scale * a_values[(i * c + k) * sequences + s];
          b_grad[r * c + k] *= scale;
        }
      }
    });
    Apply(ctx, norm_, m + first * c_m, count, normal);
    const int columns = static_cast<int>(c), inputs = static_cast<int>(c_m);
    AddWeightGradients(ctx, a_grad, c, columns, normal, c_m, inputs, count, a_grads);
    AddWeightGradients(ctx, b_grad, c, columns, normal, c_m, inputs, count, b_grads);
    a_backward.Inputs(ctx, a_grad, c, count, normal_grad, c_m);
    b_backward.Inputs(ctx, b_grad, c, count, normal_grad, c_m, true);
    NormBackward(ctx, norm_, m + first * c_m, normal_grad, count,
                 m_grad == nullptr ? nullptr : m_grad + first * c_m, norm_grads);
  }
  return OkStatus();
}

}  // namespace moesaic::science
