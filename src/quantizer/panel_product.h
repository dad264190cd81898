// Products of f32 matrices on the kernels' own f32 GEMM, for blocks of 128 columns: what the triangular
// algorithms spend their time in.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/ops.h"
#include "quantizer/factor.h"
#include "tensor/packed.h"

namespace moesaic::quantizer {

/// A right operand [inner][128], packed as the kernels read it in pieces of kInner rows.
struct PackedPanels {
  // 512 x 128 floats are 256 KiB and stay in the L2 cache while rows of the left operand pass by.
  static constexpr int kInner = 512;
  static constexpr int kPanels = kFactorBlock / tensor::kPanelRows;

  int inner = 0;  // a multiple of 64
  const float* data = nullptr;

  static int64_t Floats(int inner) { return int64_t{inner} * kFactorBlock; }
  /// Where row i of the 16 columns of a panel stands.
  static int64_t Offset(int inner, int panel, int i) {
    const int piece = i / kInner * kInner, height = std::min(kInner, inner - piece);
    return int64_t{piece} * kFactorBlock + (int64_t{panel} * height + (i - piece)) * tensor::kPanelRows;
  }
};

/// c [rows][128] += a [rows][inner] times `right`; with `accumulate` false it is set. Strides in floats. On
/// the calling thread. A row's bits do not depend on which other rows are in the call.
inline void MultiplyPanels(const kernels::ExecContext& ctx, const float* a, int64_t a_stride, int rows,
                           const PackedPanels& right, bool accumulate, float* c, int64_t c_stride) {
  for (int first = 0; first < right.inner; first += PackedPanels::kInner) {
    const int height = std::min(PackedPanels::kInner, right.inner - first);
    kernels::GemmTile tile{};
    tile.a = reinterpret_cast<const std::byte*>(a + first);
    tile.a_stride = a_stride * int64_t{sizeof(float)};
    tile.w = reinterpret_cast<const std::byte*>(right.data + PackedPanels::Offset(right.inner, 0, first));
    tile.panel_bytes = int64_t{height} * tensor::kPanelRows * int64_t{sizeof(float)};
    tile.c = c;
    tile.c_stride = c_stride;
    tile.m = rows;
    tile.k_padded = height;
    tile.panels = PackedPanels::kPanels;
    tile.columns = kFactorBlock;
    tile.accumulate = accumulate || first > 0;
    ctx.kernels->gemm[static_cast<int>(tensor::PackedFormat::kF32)].tile(tile);
  }
}

}  // namespace moesaic::quantizer
