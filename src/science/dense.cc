#include "science/dense.h"

#include <algorithm>

#include "base/check.h"
#include "base/round.h"
#include "kernels/linear.h"
#include "science/run_tasks.h"

namespace moesaic::science {

StatusOr<Dense> Dense::Pack(int n, int k, std::span<const float> weight, std::span<const float> bias,
                            tensor::PackedFormat format) {
  if (n < 1 || k < 1) return InvalidArgument("a linear layer needs inputs and outputs, not {} and {}", k, n);
  if (static_cast<int64_t>(weight.size()) != int64_t{n} * k) {
    return InvalidArgument("weight must have {} x {} elements, but has {}", n, k, weight.size());
  }
  if (!bias.empty() && static_cast<int>(bias.size()) != n) {
    return InvalidArgument("bias must have {} elements, but has {}", n, bias.size());
  }
  using tensor::PackedFormat;
  if (format != PackedFormat::kF32 && format != PackedFormat::kBF16 && format != PackedFormat::kI8) {
    return InvalidArgument("weights of this layer are f32, bf16 or int8, not {}",
                           tensor::PackedFormatName(format));
  }
  Dense dense;
  dense.matrix_.layout = tensor::PackedLayout::Of(format, n, k);
  ASSIGN_OR_RETURN(dense.buffer_, runtime::Buffer::Allocate(dense.matrix_.layout.total_bytes, false));
  tensor::PackRows(dense.matrix_.layout, 0, n, weight.data(), dense.buffer_.data());
  dense.matrix_.data = dense.buffer_.data();
  dense.bias_.assign(bias.begin(), bias.end());
  return dense;
}

std::vector<float> ColumnsOf(std::span<const float> matrix, int rows, int columns, int first, int count) {
  std::vector<float> part(static_cast<size_t>(rows) * count);
  for (int r = 0; r < rows; ++r)
    std::copy_n(matrix.data() + static_cast<size_t>(r) * columns + first, count,
                part.data() + static_cast<size_t>(r) * count);
  return part;
}

void Apply(const graph::Context& ctx, const Dense& dense, const float* x, int64_t x_stride, int64_t rows,
           float* y, int64_t y_stride, bool accumulate) {
  constexpr int64_t kRowsAtOnce = 1 << 14;  // bounds the copy of the activations
  for (int64_t first = 0; first < rows; first += kRowsAtOnce) {
    const int count = static_cast<int>(std::min(kRowsAtOnce, rows - first));
    const graph::ScratchScope scope(ctx);
    const kernels::QuantizedActivations a = kernels::QuantizeActivations(
        ctx.exec, dense.matrix().layout.format, x + first * x_stride, x_stride, count, dense.k());
    kernels::Linear(ctx.exec, {.a = &a,
                               .w = &dense.matrix(),
                               .bias = dense.bias(),
                               .c = y + first * y_stride,
                               .c_stride = y_stride,
                               .accumulate = accumulate});
  }
}

TileDense::TileDense(const graph::Context& ctx, tensor::PackedFormat format, int rows, int k)
    : kernels_(ctx.exec.kernels) {
  const int64_t row_bytes =
      base::CeilDiv(k, 64) * int64_t{kernels_->gemm[static_cast<int>(format)].unit_bytes};
  rows_ = ctx.exec.scratch->Take<std::byte>(rows * row_bytes);
  scales_ = ctx.exec.scratch->Take<float>(rows);
}

void TileDense::Run(const Dense& dense, const float* x, int64_t x_stride, int rows, float* y,
                    int64_t y_stride) const {
  const tensor::PackedMatrix& matrix = dense.matrix();
  const auto& gemm = kernels_->gemm[static_cast<int>(matrix.layout.format)];
  const int k_padded = matrix.layout.k_padded;
  const int64_t stride = int64_t{k_padded / 64} * gemm.unit_bytes;
  MOESAIC_CHECK_LE(rows * stride, static_cast<int64_t>(rows_.size()));
  for (int r = 0; r < rows; ++r)
    scales_[r] = gemm.prepare(x + r * x_stride, matrix.k(), k_padded, {}, rows_.data() + r * stride);
  gemm.Run({.a = rows_.data(),
            .a_stride = stride,
            .a_scales = scales_.data(),
            .w = matrix.panel(0),
            .panel_bytes = matrix.layout.panel_bytes,
            .w_scales = matrix.has_scales() ? matrix.scales() : nullptr,
            .w_sums = matrix.has_sums() ? matrix.sums() : nullptr,
            .bias = dense.bias(),
            .c = y,
            .c_stride = y_stride,
            .m = rows,
            .k_padded = k_padded,
            .panels = matrix.layout.panels(),
            .columns = matrix.n(),
            .accumulate = false});
}

void NormalizeRows(const graph::Context& ctx, const Norm& norm, const float* x, int64_t rows, float* y) {
  const auto n = static_cast<int>(norm.gamma.size());
  for (int64_t r = 0; r < rows; ++r)
    ctx.graph->rows.layer_norm(x + r * n, norm.gamma.data(), norm.beta.data(), n, norm.eps, y + r * n);
}

void Apply(const graph::Context& ctx, const Norm& norm, const float* x, int64_t rows, float* y) {
  const auto n = static_cast<int64_t>(norm.gamma.size());
  ForRows(ctx, rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, n)), [&](int64_t first, int64_t last) {
    NormalizeRows(ctx, norm, x + first * n, last - first, y + first * n);
  });
}

void Activate(const graph::Context& ctx, const float* x, int64_t count, graph::Activation activation,
              float* y) {
  ForRows(ctx, count, 1 << 15, [&](int64_t first, int64_t last) {
    const float* row = x + first;
    ctx.graph->rows.activate(&row, 1, nullptr, 0, static_cast<int>(last - first), activation, y + first);
  });
}

}  // namespace moesaic::science
