#include "quantizer/calibrate/output_error.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/round.h"
#include "kernels/linear.h"
#include "runtime/memory.h"
#include "tensor/packed.h"

namespace moesaic::quantizer {

std::vector<float> Outputs(const kernels::ExecContext& ctx, const TokenSample& x, const WeightRows& w) {
  constexpr auto kFormat = tensor::PackedFormat::kF32;
  const size_t mark = ctx.scratch->Mark();
  const auto layout = tensor::PackedLayout::Of(kFormat, w.n, x.k);
  const auto packed = ctx.scratch->Take<std::byte>(static_cast<size_t>(layout.total_bytes));
  ctx.pool->Run(layout.panels(), [&](int64_t panel, int) {
    std::fill_n(packed.data() + panel * layout.panel_bytes, layout.panel_bytes, std::byte{0});
    const int row = static_cast<int>(panel) * tensor::kPanelRows;
    tensor::PackRows(layout, row, std::min(tensor::kPanelRows, w.n - row), w.rows + int64_t{row} * x.k,
                     packed.data());
  });
  const tensor::PackedMatrix matrix{.layout = layout, .data = packed.data()};
  const kernels::QuantizedActivations rows =
      kernels::QuantizeActivations(ctx, kFormat, x.rows, x.k, x.count, x.k);
  std::vector<float> outputs(static_cast<size_t>(x.count) * w.n);
  kernels::Linear(ctx, {.a = &rows, .w = &matrix, .c = outputs.data(), .c_stride = w.n});
  ctx.scratch->Rewind(mark);
  return outputs;
}

double SquaredDistance(const kernels::ExecContext& ctx, std::span<const float> a, std::span<const float> b) {
  constexpr int64_t kPart = 1 << 16;
  MOESAIC_CHECK_EQ(a.size(), b.size());
  std::vector<double> parts(base::CeilDiv(a.size(), kPart));
  ctx.pool->Run(std::ssize(parts), [&](int64_t part, int) {
    const auto end = std::min<int64_t>(std::ssize(a), (part + 1) * kPart);
    for (int64_t i = part * kPart; i < end; ++i) {
      const double difference = double{a[i]} - b[i];
      parts[part] += difference * difference;
    }
  });
  return std::accumulate(parts.begin(), parts.end(), 0.0);
}

}  // namespace moesaic::quantizer
