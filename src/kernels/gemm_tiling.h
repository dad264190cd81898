// Tiling of matrix products into tasks for the thread pool, and the micro-kernel call of one task.
#pragma once

#include <cstdint>

#include "base/round.h"
#include "kernels/kernel_table.h"
#include "kernels/linear.h"

namespace moesaic::kernels {

/// Tasks of a product: row tiles times panel groups, each computed whole by one worker. Panels are split into
/// slices, one per NUMA node, or one slice in total. A group does not cross slices.
struct GemmTiling {
  int rows, panels;  // panels of the whole product
  int row_tile;      // rows per task; the last tile may have fewer
  int panel_group;   // panels per task; a slice's last group may have fewer
  int slice_panels;  // panels per slice of the matrix that contains the product's panels
  int first_panel;   // first panel of the product, counted in that matrix

  struct Panels {
    int begin, end;  // indices into the product's panels
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

/// Tiles a product of `rows` rows with `weights`. `matrices` such products run in the same job (experts of a
/// MoE layer, heads); all of their tasks together should keep `threads` workers busy to the end.
GemmTiling TileGemm(int rows, const tensor::PackedMatrix& weights, int threads, int matrices,
                    const TileSizes& sizes);

/// Allocates `rows` quantized rows of `k` activations from `scratch`.
QuantizedActivations AllocateActivations(const KernelTable& kernels, runtime::Arena* scratch,
                                         tensor::PackedFormat format, int rows, int k);

/// Quantizes one row into its position in `to`.
inline void QuantizeActivationRow(const KernelTable& kernels, const float* x,
                                  tensor::StaticScale static_scale, int row, const QuantizedActivations& to) {
  const auto& gemm = kernels.gemm[static_cast<int>(to.format)];
  to.scales[row] = gemm.prepare(x, to.k, to.k_padded, static_scale, to.data.data() + row * to.stride);
}

/// Returns the micro-kernel call for rows [row, row + rows) of A times panels [panel, panel + panels) of W,
/// which must be in one slice; it writes to the block at c. No bias, no accumulation. The call should run on
/// a thread of NUMA node `node` (ThreadPool::NodeOf).
GemmTile TileOf(const QuantizedActivations& a, int row, int rows, const tensor::PackedMatrix& w, int node,
                int panel, int panels, float* c, int64_t c_stride);

}  // namespace moesaic::kernels
