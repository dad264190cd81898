#include "kernels/gemm_cut.h"

#include <algorithm>

#include "base/check.h"
#include "base/round.h"

namespace moesaic::kernels {
namespace {

// A task streams its rows past its panels, which should stay in the L2 cache (1 MiB or more on all processors
// with AVX-512, 2 MiB where there are tiles) and leave room for the rows.
constexpr int64_t kMostGroupBytes = 512 << 10;
constexpr int64_t kMostRowBytes = 512 << 10;
// Below this a task is over in about a microsecond and costs as much to hand out.
constexpr int64_t kLeastGroupBytes = 16 << 10;
constexpr int kTasksPerThread =
    4;                         // so that the last one to finish is late by a quarter of its share at most
constexpr int kRowUnit = 96;   // whole blocks of 12 (vectors) and of 32 (tiles)
constexpr int kPanelUnit = 4;  // panels that kernels for few rows take at once

}  // namespace

GemmCut CutGemm(int rows, const tensor::PackedLayout& layout, int threads, int matrices) {
  GemmCut cut{
      .rows = rows, .panels = layout.panels(), .row_tile = std::max(rows, 1), .panel_group = layout.panels()};
  if (rows == 0) return cut;  // no tasks
  // Of a prepared row, but for the scales of group-scaled formats, a quarter more.
  const int64_t row_bytes = std::max<int64_t>(layout.panel_bytes / tensor::kPanelRows, layout.k_padded);
  const int64_t rows_in_cache = std::max<int64_t>(kMostRowBytes / row_bytes / kRowUnit, 1) * kRowUnit;
  if (rows > rows_in_cache + kRowUnit / 2) cut.row_tile = static_cast<int>(rows_in_cache);

  const int64_t wanted =
      base::CeilDiv(int64_t{threads} * kTasksPerThread, int64_t{matrices} * cut.row_tiles());
  const int64_t least = std::max<int64_t>(kLeastGroupBytes / layout.panel_bytes, 1);
  const int64_t most = std::max<int64_t>(kMostGroupBytes / layout.panel_bytes, least);
  int64_t group = std::clamp<int64_t>(base::CeilDiv(cut.panels, wanted), least, most);
  if (group > kPanelUnit) group = group / kPanelUnit * kPanelUnit;
  cut.panel_group = static_cast<int>(std::min<int64_t>(group, cut.panels));
  return cut;
}

PreparedRows TakePreparedRows(const KernelTable& kernels, runtime::Arena* scratch,
                              tensor::PackedFormat format, int rows, int k) {
  const auto& gemm = kernels.gemm[static_cast<int>(format)];
  PreparedRows prepared{};
  prepared.format = format;
  prepared.rows = rows;
  prepared.k = k;
  prepared.k_padded = tensor::PackedLayout::Of(format, 1, k).k_padded;
  // An odd number of cache lines: rows a power of two apart would fall into the same few sets of the caches,
  // and a tile load reads 16 rows at once.
  const int64_t bytes = int64_t{prepared.k_padded} / tensor::kPackedKUnit * gemm.unit_bytes;
  prepared.stride = (bytes + 63) / 64 * 64 | 64;
  prepared.data = scratch->Take<std::byte>(rows * prepared.stride);
  prepared.scales = scratch->Take<float>(rows);
  return prepared;
}

GemmTile TileOf(const PreparedRows& a, int row, int rows, const tensor::PackedMatrix& w, int panel,
                int panels, float* c, int64_t c_stride) {
  const int output = panel * tensor::kPanelRows;
  return {.a = a.data.data() + row * a.stride,
          .a_stride = a.stride,
          .a_scales = a.scales.data() + row,
          .w = w.panel(panel),
          .panel_bytes = w.layout.panel_bytes,
          .w_scales = w.has_scales() ? w.scales() + output : nullptr,
          .w_sums = w.has_sums() ? w.sums() + output : nullptr,
          .bias = nullptr,
          .c = c,
          .c_stride = c_stride,
          .m = rows,
          .k_padded = a.k_padded,
          .panels = panels,
          .columns = std::min(panels * tensor::kPanelRows, w.n() - output),
          .accumulate = false};
}

}  // namespace moesaic::kernels
