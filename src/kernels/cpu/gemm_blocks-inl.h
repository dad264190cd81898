// Splits a GemmTile into register blocks, for kernels whose accumulators are in vector registers.
//
// A kernel is a type with Block<rows, panels>(tile, row, panel) and two shapes that fit its registers:
//   wide  few rows by many panels: decode, bound by the stream of weights; enough accumulator chains of
//         several panels hide the latency of one
//   tall  many rows by few panels: prefill, bound by the multipliers; each weight register serves many rows
// Every output has one accumulator chain over k, in the same order in every shape. A row's result thus does
// not depend on the number of rows.
#pragma once

#include "kernels/micro_kernels.h"

namespace moesaic::kernels::cpu {
namespace {

// Prefetch distance of weights that come from memory, in bytes. Measured on Sapphire Rapids with weights in
// memory: 0.87 of the bandwidth of plain loads without prefetching, 0.92 with 1 to 2 KiB, and less than
// without for 8 KiB.
constexpr int kPrefetchBytes = 2048;

/// Addresses row m of a block by three pointers and two strides: 12 rows would need more pointers than there
/// are general registers.
struct RowPointers {
  const std::byte* at[3];
  int64_t stride, stride3;

  RowPointers(const GemmTile& t, int row)
      : at{t.a + row * t.a_stride, t.a + (row + 4) * t.a_stride, t.a + (row + 8) * t.a_stride},
        stride(t.a_stride),
        stride3(3 * t.a_stride) {}

  const std::byte* operator[](int m) const {
    const std::byte* base = at[m / 4];
    return m % 4 == 0 ? base : m % 4 == 1 ? base + stride : m % 4 == 2 ? base + 2 * stride : base + stride3;
  }
};

template <typename Kernel, int kPanels, int kRows>
inline void RunBlock(const GemmTile& t, int row, int rows, int panel) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return RunBlock<Kernel, kPanels, kRows - 1>(t, row, rows, panel);
  }
  Kernel::template Block<kRows, kPanels>(t, row, panel);
}

/// Runs rows [0, t.m) by panels [panel, panel + kPanels) in the minimum number of blocks, of even sizes.
template <typename Kernel, int kPanels, int kMaxRows>
inline void RunPanels(const GemmTile& t, int panel) {
  const int blocks = (t.m + kMaxRows - 1) / kMaxRows;
  for (int b = 0, row = 0; b < blocks; ++b) {
    const int rows = (t.m - row + blocks - b - 1) / (blocks - b);
    RunBlock<Kernel, kPanels, kMaxRows>(t, row, rows, panel);
    row += rows;
  }
}

template <typename Kernel>
inline void RunBlocks(const GemmTile& t) {
  int panel = 0;
  if (t.m <= Kernel::kWideRows) {
    for (; panel + Kernel::kWidePanels <= t.panels; panel += Kernel::kWidePanels) {
      RunBlock<Kernel, Kernel::kWidePanels, Kernel::kWideRows>(t, 0, t.m, panel);
    }
  }
  if constexpr (Kernel::kTallPanels > 1) {
    for (; panel + Kernel::kTallPanels <= t.panels; panel += Kernel::kTallPanels) {
      RunPanels<Kernel, Kernel::kTallPanels, Kernel::kTallRows>(t, panel);
    }
  }
  for (; panel < t.panels; ++panel) RunPanels<Kernel, 1, Kernel::kTallRows>(t, panel);
}

/// Returns the number of outputs of `panel` that are written.
inline int ColumnsOf(const GemmTile& t, int panel) {
  const int columns = t.columns - 16 * panel;
  return columns < 16 ? columns : 16;
}

}  // namespace
}  // namespace moesaic::kernels::cpu
