#include "kernels/gemm_tiling.h"

#include <algorithm>

#include "base/check.h"
#include "base/round.h"

namespace moesaic::kernels {
namespace {

// Smaller tasks finish in about a microsecond and cost as much to schedule.
constexpr int64_t kMinGroupBytes = 16 << 10;
constexpr int kRowUnit = 96;   // whole blocks of 12 (vectors) and of 32 (tiles)
constexpr int kPanelUnit = 4;  // panels that kernels for few rows process together

}  // namespace

GemmTiling::Panels GemmTiling::Slice(int slice) const {
  const int begin = std::clamp(slice * slice_panels - first_panel, 0, panels);
  return {begin, std::clamp((slice + 1) * slice_panels - first_panel, begin, panels)};
}

int GemmTiling::panel_groups() const {
  int groups = 0;
  for (int slice = 0; slice < slices(); ++slice) groups += panel_groups(slice);
  return groups;
}

GemmTiling TileGemm(int rows, const tensor::PackedMatrix& weights, int threads, int matrices,
                    const TileSizes& sizes) {
  const tensor::PackedLayout& layout = weights.layout;
  const int first_panel = weights.slice_panels > 0 ? weights.first_row / tensor::kPanelRows : 0;
  GemmTiling tiling{.rows = rows,
                    .panels = layout.panels(),
                    .row_tile = std::max(rows, 1),
                    .panel_group = layout.panels(),
                    .slice_panels = weights.image_panels(),
                    .first_panel = first_panel};
  if (rows == 0) return tiling;  // no tasks
  // Bytes of a prepared row; the scales of group-scaled formats add a quarter.
  const int64_t row_bytes = std::max<int64_t>(layout.panel_bytes / tensor::kPanelRows, layout.k_padded);
  const int64_t rows_in_cache = std::max<int64_t>(sizes.row_bytes / row_bytes / kRowUnit, 1) * kRowUnit;
  if (rows > rows_in_cache + kRowUnit / 2) tiling.row_tile = static_cast<int>(rows_in_cache);

  const int64_t wanted =
      base::CeilDiv(int64_t{threads} * sizes.tasks_per_thread, int64_t{matrices} * tiling.row_tiles());
  const int64_t least = std::max<int64_t>(kMinGroupBytes / layout.panel_bytes, 1);
  const int64_t most = std::max<int64_t>(sizes.panel_bytes / layout.panel_bytes, least);
  int64_t group = std::clamp<int64_t>(base::CeilDiv(tiling.panels, wanted), least, most);
  if (group > kPanelUnit) group = group / kPanelUnit * kPanelUnit;
  tiling.panel_group =
      static_cast<int>(std::min<int64_t>(group, std::min(tiling.panels, tiling.slice_panels)));
  return tiling;
}

QuantizedActivations AllocateActivations(const KernelTable& kernels, runtime::Arena* scratch,
                                         tensor::PackedFormat format, int rows, int k) {
  const auto& gemm = kernels.gemm[static_cast<int>(format)];
  QuantizedActivations prepared{};
  prepared.format = format;
  prepared.rows = rows;
  prepared.k = k;
  prepared.k_padded = tensor::PackedLayout::Of(format, 1, k).k_padded;
  // An odd number of cache lines: rows a power of two apart would map to the same few cache sets, and a tile
  // load reads 16 rows together.
  const int64_t bytes = int64_t{prepared.k_padded} / tensor::kPackedKUnit * gemm.unit_bytes;
  prepared.stride = (bytes + 63) / 64 * 64 | 64;
  prepared.data = scratch->Take<std::byte>(rows * prepared.stride);
  prepared.scales = scratch->Take<float>(rows);
  return prepared;
}

GemmTile TileOf(const QuantizedActivations& a, int row, int rows, const tensor::PackedMatrix& w, int node,
                int panel, int panels, float* c, int64_t c_stride) {
  const tensor::PackedMatrix at = w.At(panel, node);
  return {.a = a.data.data() + row * a.stride,
          .a_stride = a.stride,
          .a_scales = a.scales.data() + row,
          .w = at.panel(0),
          .panel_bytes = w.layout.panel_bytes,
          .w_scales = at.has_scales() ? at.scales() : nullptr,
          .w_sums = at.has_sums() ? at.sums() : nullptr,
          .bias = nullptr,
          .c = c,
          .c_stride = c_stride,
          .m = rows,
          .k_padded = a.k_padded,
          .panels = panels,
          .columns = std::min(panels * tensor::kPanelRows, at.n()),
          .accumulate = false};
}

}  // namespace moesaic::kernels
