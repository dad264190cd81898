// How a matrix product is cut into tasks for the thread pool, and the micro-kernel call that one task makes.
#pragma once

#include <cstdint>

#include "base/round.h"
#include "kernels/ops.h"

namespace moesaic::kernels {

/// A product's tasks: row tiles times panel groups, each computed whole by one worker. Panels come in slices,
/// one a NUMA node; without slices there is one of all panels. A group lies in one slice.
struct GemmCut {
  int rows, panels;  // of the whole product
  int row_tile;      // rows of a task, but of the last
  int panel_group;   // panels of a task, but of a slice's last
  int slice_panels;  // of the matrix of which the product's are a run
  int first_panel;   // of that run, in the matrix

  struct Panels {
    int begin, end;  // of the product
  };
  int slices() const { return base::CeilDiv(first_panel + panels, slice_panels); }
  Panels Slice(int slice) const;  // may be empty
  int row_tiles() const { return base::CeilDiv(rows, row_tile); }
  int panel_groups(int slice) const {
    return base::CeilDiv(Slice(slice).end - Slice(slice).begin, panel_group);
  }
  int panel_groups() const;
  int64_t tasks(int slice) const { return int64_t{row_tiles()} * panel_groups(slice); }
  int64_t tasks() const { return int64_t{row_tiles()} * panel_groups(); }
};

/// Cuts a product of `rows` rows with `weights`. `matrices` such products run in the same job (experts of a
/// MoE layer, heads); all of their tasks together should keep `threads` busy to the end.
GemmCut CutGemm(int rows, const tensor::PackedMatrix& weights, int threads, int matrices,
                const CutSizes& sizes);

/// Memory for `rows` prepared rows of `k` activations, from `scratch`.
PreparedRows TakePreparedRows(const KernelTable& kernels, runtime::Arena* scratch,
                              tensor::PackedFormat format, int rows, int k);

/// Prepares one row into its place in `to`.
inline void PrepareRow(const KernelTable& kernels, const float* x, tensor::StaticScale static_scale, int row,
                       const PreparedRows& to) {
  const auto& gemm = kernels.gemm[static_cast<int>(to.format)];
  to.scales[row] = gemm.prepare(x, to.k, to.k_padded, static_scale, to.data.data() + row * to.stride);
}

/// Rows [row, row + rows) of A times panels [panel, panel + panels) of W, which lie in one slice, to the
/// block at c. No bias, no accumulation. A thread of NUMA node `node` (ThreadPool::NodeOf) is to run it.
GemmTile TileOf(const PreparedRows& a, int row, int rows, const tensor::PackedMatrix& w, int node, int panel,
                int panels, float* c, int64_t c_stride);

}  // namespace moesaic::kernels
