#include <algorithm>

#include "base/check.h"
#include "kernels/gemm_cut.h"
#include "kernels/ops.h"

namespace moesaic::kernels {
namespace {

// Below this many values the pool's round trip costs more than it saves.
constexpr int64_t kLeastValuesForPool = 16 << 10;

void CheckParams(const LinearParams& p) {
  MOESAIC_CHECK(p.a->format == p.w->layout.format);
  MOESAIC_CHECK_EQ(p.a->k, p.w->k());
  MOESAIC_CHECK_EQ(p.w->first_row % tensor::kPanelRows, 0);
}

void RunTask(const ExecContext& ctx, const LinearParams& p, const GemmCut& cut, int64_t task) {
  // Neighbouring tasks share weights: what one worker fetches, the next finds in a shared cache.
  const int row = static_cast<int>(task % cut.row_tiles()) * cut.row_tile;
  const int panel = static_cast<int>(task / cut.row_tiles()) * cut.panel_group;
  const int rows = std::min(cut.row_tile, cut.rows - row);
  const int panels = std::min(cut.panel_group, cut.panels - panel);
  const int output = panel * tensor::kPanelRows;
  GemmTile tile = TileOf(*p.a, row, rows, *p.w, panel, panels, p.c + row * p.c_stride + output, p.c_stride);
  tile.bias = p.bias != nullptr ? p.bias + output : nullptr;
  tile.accumulate = p.accumulate;
  ctx.kernels->gemm[static_cast<int>(p.a->format)].tile(tile);
}

}  // namespace

PreparedRows PrepareRows(const ExecContext& ctx, tensor::PackedFormat format, const float* x,
                         int64_t x_stride, int rows, int k, float static_scale) {
  const PreparedRows prepared = TakePreparedRows(*ctx.kernels, ctx.scratch, format, rows, k);
  auto prepare = [&](int64_t row, int) {
    PrepareRow(*ctx.kernels, x + row * x_stride, static_scale, static_cast<int>(row), prepared);
  };
  if (int64_t{rows} * k < kLeastValuesForPool) {
    for (int row = 0; row < rows; ++row) prepare(row, 0);
  } else {
    ctx.pool->Run(rows, prepare);
  }
  return prepared;
}

void Linear(const ExecContext& ctx, const LinearParams& params) { LinearGroup(ctx, {&params, 1}); }

void LinearGroup(const ExecContext& ctx, std::span<const LinearParams> group) {
  const size_t mark = ctx.scratch->Mark();
  const auto cuts = ctx.scratch->Take<GemmCut>(group.size());
  const auto first =
      ctx.scratch->Take<int64_t>(group.size() + 1);  // task numbers at which each product begins
  first[0] = 0;
  for (size_t i = 0; i < group.size(); ++i) {
    const LinearParams& p = group[i];
    CheckParams(p);
    cuts[i] = CutGemm(p.a->rows, p.w->layout, ctx.pool->size(), static_cast<int>(group.size()));
    first[i + 1] = first[i] + cuts[i].tasks();
  }
  ctx.pool->Run(first[group.size()], [&](int64_t task, int) {
    const size_t i = std::upper_bound(first.begin(), first.end(), task) - first.begin() - 1;
    RunTask(ctx, group[i], cuts[i], task - first[i]);
  });
  ctx.scratch->Rewind(mark);
}

}  // namespace moesaic::kernels
