// The loops of the group-scaled kernels, for any width of vectors. `Ops` is an instruction set:
//
//   Ints, Floats   registers of kOutputs outputs: 4 codes or one number each
//   Dot            acc += dot of unsigned codes and signed activations, exact
//
// A block keeps f32 accumulators and the integer dots of one group, both [rows][panels].
#pragma once

#include "kernels/cpu/gemm_blocks-inl.h"
#include "kernels/cpu/gemm_group_formats-inl.h"

namespace moesaic::kernels::cpu {
namespace {

template <typename Ops, typename Format>
struct Grouped {
  using Ints = typename Ops::Ints;
  using Floats = typename Ops::Floats;
  static constexpr int kWidePanels = Ops::kWidePanels, kWideRows = Ops::kWideRows;
  static constexpr int kTallPanels = Ops::kTallPanels, kTallRows = Ops::kTallRows;
  static constexpr int kParts = 16 / Ops::kOutputs;  // registers of a panel
  static constexpr int kGroups = kUnitInputs / Format::kGroup;

  // The codes of inputs [8 pair, 8 pair + 8) of a unit, of the outputs of one register.
  struct Pair {
    Ints low, high;
  };
  static Pair Codes(const std::byte* unit, int pair, int part) {
    const std::byte* codes = unit + kUnitScaleBytes + 4 * Ops::kOutputs * part;
    if constexpr (Format::kBits == 8) return {Ops::Load(codes + 128 * pair), Ops::Load(codes + 128 * pair + 64)};
    const Ints both = Ops::Load(codes + 64 * pair);
    if constexpr (Format::kTable) return {Ops::LookUp(Ops::LowNibbles(both)), Ops::LookUp(Ops::HighNibbles(both))};
    return {Ops::LowNibbles(both), Ops::HighNibbles(both)};
  }

  static Floats Scales(const std::byte* unit, int group, int part) {
    if constexpr (Format::kE4M3) {
      return Ops::E4M3Scales(unit + 16 * group + Ops::kOutputs * part);
    } else {
      return Ops::HalfScales(unit + 32 * group + 2 * Ops::kOutputs * part);
    }
  }

  template <int kRows, int kPanels>
  static void Block(const GemmTile& t, int row, int panel) {
    constexpr int kWidth = kPanels * kParts;
    const RowPointers a(t, row);
    const std::byte* w = t.w + panel * t.panel_bytes;
    const int64_t scales_at = t.k_padded, corrections_at = t.k_padded + t.k_padded / 8;
    Floats acc[kRows][kWidth];
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 16
      for (int p = 0; p < kWidth; ++p) acc[m][p] = Ops::Zero();
    }
    const int units = t.k_padded / kUnitInputs;
    for (int u = 0; u < units; ++u) {
      const std::byte* unit = w + int64_t{u} * kUnitBytes<Format>;
      if constexpr (kPanels == kWidePanels) {
#pragma GCC unroll 16
        for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 32
          for (int line = 0; line < kUnitBytes<Format>; line += 64) {
            Ops::Prefetch(unit + p * t.panel_bytes + line);
          }
        }
      }
#pragma GCC unroll 4
      for (int g = 0; g < kGroups; ++g) {
        Ints dots[kRows][kWidth];
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) {
          const Ints correction = Ops::Broadcast(a[m] + corrections_at + 4 * (kGroups * u + g));
#pragma GCC unroll 16
          for (int p = 0; p < kWidth; ++p) dots[m][p] = correction;
        }
#pragma GCC unroll 4
        for (int pair = g * Format::kGroup / 8; pair < (g + 1) * Format::kGroup / 8; ++pair) {
          Pair codes[kWidth];
#pragma GCC unroll 16
          for (int p = 0; p < kWidth; ++p) {
            codes[p] = Codes(unit + p / kParts * t.panel_bytes, pair, p % kParts);
          }
#pragma GCC unroll 16
          for (int m = 0; m < kRows; ++m) {
            const std::byte* x = a[m] + kUnitInputs * u + 8 * pair;
            const Ints low = Ops::Broadcast(x), high = Ops::Broadcast(x + 4);
#pragma GCC unroll 16
            for (int p = 0; p < kWidth; ++p) Ops::template Dot<Format>(dots[m][p], codes[p].low, low);
#pragma GCC unroll 16
            for (int p = 0; p < kWidth; ++p) Ops::template Dot<Format>(dots[m][p], codes[p].high, high);
          }
        }
        Floats scales[kWidth];
#pragma GCC unroll 16
        for (int p = 0; p < kWidth; ++p) scales[p] = Scales(unit + p / kParts * t.panel_bytes, g, p % kParts);
        const int64_t activation_group = (kUnitInputs * u + Format::kGroup * g) / kActivationGroup;
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) {
          const Floats scale = Ops::BroadcastFloat(a[m] + scales_at + 4 * activation_group);
#pragma GCC unroll 16
          for (int p = 0; p < kWidth; ++p) {
            acc[m][p] = Ops::MultiplyAdd(Ops::Multiply(Ops::ToFloats(dots[m][p]), scale), scales[p], acc[m][p]);
          }
        }
      }
    }
#pragma GCC unroll 16
    for (int p = 0; p < kWidth; ++p) {
      const int output = 16 * (panel + p / kParts) + Ops::kOutputs * (p % kParts);
      const Floats scale = Ops::Multiply(Ops::Same(Format::kUnit), Ops::LoadFloats(t.w_scales + output));
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        Ops::Store(t, row + m, panel + p / kParts, p % kParts, Ops::Multiply(acc[m][p], scale));
      }
    }
  }
};

}  // namespace
}  // namespace moesaic::kernels::cpu
