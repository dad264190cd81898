#include "layers/linear.h"

#include <algorithm>

#include "base/check.h"
#include "kernels/linear.h"

namespace moesaic::layers {

using kernels::LinearParams;
using kernels::QuantizedActivations;

void Apply(const kernels::ExecContext& ctx, const Linear& linear, const float* x, int64_t x_stride, int rows,
           float* y, int64_t y_stride, bool accumulate, const kernels::ColumnParts& parts) {
  const ScratchScope scope(ctx);
  const QuantizedActivations a = kernels::QuantizeActivations(ctx, linear.weight.layout.format, x, x_stride,
                                                              rows, linear.k(), linear.weight.input_scale);
  for (int part = 0; part < parts.count; ++part) {
    const auto [first, count] = parts.Of(linear.n(), part);
    if (count == 0) continue;
    const tensor::PackedMatrix weight = linear.weight.Rows(first, count);
    kernels::Linear(ctx, {.a = &a,
                          .w = &weight,
                          .bias = linear.bias == nullptr ? nullptr : linear.bias + first,
                          .c = y + first,
                          .c_stride = y_stride,
                          .accumulate = accumulate});
    parts.Done(first, count);
  }
}

void ApplyGroup(const kernels::ExecContext& ctx, std::span<const LinearOutput> outputs, const float* x,
                int64_t x_stride, int rows) {
  constexpr size_t kMax = 8;
  MOESAIC_CHECK_LE(outputs.size(), kMax);
  const ScratchScope scope(ctx);
  QuantizedActivations prepared[kMax];
  LinearParams params[kMax];
  for (size_t i = 0; i < outputs.size(); ++i) {
    const tensor::PackedMatrix& weight = outputs[i].linear->weight;
    const auto same = [&](size_t j) {
      const tensor::PackedMatrix& other = outputs[j].linear->weight;
      return other.layout.format == weight.layout.format && other.input_scale == weight.input_scale;
    };
    size_t j = 0;
    while (!same(j)) ++j;  // terminates at i at the latest
    if (j == i) {
      prepared[i] = kernels::QuantizeActivations(ctx, weight.layout.format, x, x_stride, rows, weight.k(),
                                                 weight.input_scale);
    }
    params[i] = {.a = &prepared[j],
                 .w = &weight,
                 .bias = outputs[i].linear->bias,
                 .c = outputs[i].y,
                 .c_stride = outputs[i].y_stride};
  }
  kernels::LinearGroup(ctx, {params, outputs.size()});
}

}  // namespace moesaic::layers
