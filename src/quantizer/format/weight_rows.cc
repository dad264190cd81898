#include "quantizer/format/weight_rows.h"

#include <algorithm>
#include <mutex>

#include "base/round.h"

namespace moesaic::quantizer {

StatusOr<std::vector<float>> ReadRows(const kernels::ExecContext& ctx, const checkpoint::Checkpoint& source,
                                      const std::string& module, int n, int k, int first, int count) {
  constexpr int kTogether = 16;  // whole rows of zero points, which 8 outputs share
  ASSIGN_OR_RETURN(const checkpoint::LinearSource linear, source.FindLinear(module, n, k));
  std::vector<float> rows(static_cast<size_t>(count) * k);
  std::mutex mutex;
  Status failure;
  ctx.pool->Run(base::CeilDiv(count, kTogether), [&](int64_t task, int) {
    const int64_t begin = task * kTogether, some = std::min<int64_t>(kTogether, count - begin);
    Status status = source.ReadLinearRows(
        linear, first + begin, some,
        std::span(rows).subspan(static_cast<size_t>(begin * k), static_cast<size_t>(some * k)));
    if (status.ok()) return;
    const std::lock_guard<std::mutex> lock(mutex);
    if (failure.ok()) failure = std::move(status);
  });
  RETURN_IF_ERROR(failure);
  source.ForgetMaps();
  return rows;
}

Status AddRounded(const kernels::ExecContext& ctx, const Precision& precision, int n, int k, int first,
                  int count, const float* rows, const ScaleSearch& search, RuntimeMatrix* matrix) {
  const Grid grid = precision.grid();
  ASSIGN_OR_RETURN(const QuantizedMatrix rounded, RoundToNearest(ctx, grid, rows, count, k, search));
  const std::vector<StoredTensor> tensors = TensorsOf(grid, n, k);
  std::vector<std::vector<std::byte>> bytes;
  std::vector<std::byte*> out;
  for (const StoredTensor& tensor : tensors) {
    const int64_t per_row = tensor.outputs_per_row;
    bytes.emplace_back(
        per_row == 0 ? 0 : static_cast<size_t>(base::CeilDiv(count, per_row) * tensor.row_bytes()));
    out.push_back(per_row == 0 ? nullptr : bytes.back().data());
  }
  EncodeRows(*ctx.pool, rounded, tensors, out);
  return matrix->Add(*ctx.pool, first, rounded, tensors, out);
}

}  // namespace moesaic::quantizer
