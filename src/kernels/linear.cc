#include <algorithm>

#include "base/check.h"
#include "kernels/gemm_tiling.h"
#include "kernels/linear.h"

namespace moesaic::kernels {
namespace {

// Below this many values a round trip through the pool costs more than it saves.
constexpr int64_t kMinValuesForPool = 16 << 10;

void CheckParams(const LinearParams& p) {
  MOESAIC_CHECK(p.a->format == p.w->layout.format);
  MOESAIC_CHECK_EQ(p.a->k, p.w->k());
  MOESAIC_CHECK_EQ(p.w->first_row % tensor::kPanelRows, 0);
}

void RunTask(const ExecContext& ctx, const LinearParams& p, const GemmTiling& tiling, int slice, int64_t task,
             int node) {
  // Adjacent tasks share weights: those that one worker fetches, the next finds in a shared cache.
  const int row = static_cast<int>(task % tiling.row_tiles()) * tiling.row_tile;
  const GemmTiling::Panels all = tiling.Slice(slice);
  const int panel = all.begin + static_cast<int>(task / tiling.row_tiles()) * tiling.panel_group;
  const int rows = std::min(tiling.row_tile, tiling.rows - row);
  const int panels = std::min(tiling.panel_group, all.end - panel);
  const int output = panel * tensor::kPanelRows;
  GemmTile tile =
      TileOf(*p.a, row, rows, *p.w, node, panel, panels, p.c + row * p.c_stride + output, p.c_stride);
  tile.bias = p.bias != nullptr ? p.bias + output : nullptr;
  tile.accumulate = p.accumulate;
  ctx.kernels->gemm[static_cast<int>(p.a->format)].Run(tile);
}

}  // namespace

QuantizedActivations QuantizeActivations(const ExecContext& ctx, tensor::PackedFormat format, const float* x,
                                         int64_t x_stride, int rows, int k,
                                         tensor::StaticScale static_scale) {
  const QuantizedActivations prepared = AllocateActivations(*ctx.kernels, ctx.scratch, format, rows, k);
  auto prepare = [&](int64_t row, int) {
    QuantizeActivationRow(*ctx.kernels, x + row * x_stride, static_scale, static_cast<int>(row), prepared);
  };
  if (int64_t{rows} * k < kMinValuesForPool) {
    for (int row = 0; row < rows; ++row) prepare(row, 0);
  } else {
    ctx.pool->Run(rows, prepare);
  }
  return prepared;
}

void Linear(const ExecContext& ctx, const LinearParams& params) { LinearGroup(ctx, {&params, 1}); }

void LinearGroup(const ExecContext& ctx, std::span<const LinearParams> group) {
  const size_t mark = ctx.scratch->Mark();
  const auto tilings = ctx.scratch->Take<GemmTiling>(group.size());
  int slices = 1;
  for (size_t i = 0; i < group.size(); ++i) {
    const LinearParams& p = group[i];
    CheckParams(p);
    tilings[i] =
        TileGemm(p.a->rows, *p.w, ctx.pool->size(), static_cast<int>(group.size()), ctx.kernels->tile_sizes);
    slices = std::max(slices, tilings[i].slices());
  }
  // Task numbers at which each product's part of each slice begins, slice by slice, and the ends of the
  // slices.
  const size_t parts = slices * group.size();
  const auto first = ctx.scratch->Take<int64_t>(parts + 1);
  const auto ends = ctx.scratch->Take<int64_t>(slices);
  first[0] = 0;
  for (size_t part = 0; part < parts; ++part) {
    const auto slice = static_cast<int>(part / group.size());
    first[part + 1] = first[part] + tilings[part % group.size()].tasks(slice);
  }
  for (int slice = 0; slice < slices; ++slice) ends[slice] = first[(slice + 1) * group.size()];
  ctx.pool->RunByNode(ends, [&](int64_t task, int worker) {
    const size_t part = std::upper_bound(first.begin(), first.end(), task) - first.begin() - 1;
    const size_t i = part % group.size();
    RunTask(ctx, group[i], tilings[i], static_cast<int>(part / group.size()), task - first[part],
            ctx.pool->NodeOf(worker));
  });
  ctx.scratch->Rewind(mark);
}

}  // namespace moesaic::kernels
