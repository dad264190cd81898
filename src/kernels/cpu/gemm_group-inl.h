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

  // The codes of inputs [8 pair, 8 pair + 8) of a unit, of one register's outputs.
  struct Pair {
    Ints low, high;
  };
  static Pair Codes(const std::byte* unit, int pair, int part) {
    const std::byte* codes = unit + kUnitScaleBytes + 4 * Ops::kOutputs * part;
    if constexpr (Format::kBits == 8) {
      return {Ops::Load(codes + 128 * pair), Ops::Load(codes + 128 * pair + 64)};
    }
    const Ints both = Ops::Load(codes + 64 * pair);
    const Pair nibbles = {Ops::LowNibbles(both), Ops::HighNibbles(both)};
    if constexpr (Format::kTable) return {Ops::LookUp(nibbles.low), Ops::LookUp(nibbles.high)};
    if constexpr (Format::kBits == 6) {
      const Ints high = Ops::Load(codes + 512 + 64 * (pair / 2));
      if (pair % 2 == 0)
        return {Ops::WithHighBits(nibbles.low, high, 0), Ops::WithHighBits(nibbles.high, high, 1)};
      return {Ops::WithHighBits(nibbles.low, high, 2), Ops::WithHighBits(nibbles.high, high, 3)};
    }
    return nibbles;
  }

  static Floats Scales(const std::byte* unit, const std::byte* super, int group, int part) {
    if constexpr (Format::kScale == GroupScale::kE4M3) {
      return Ops::E4M3Scales(unit + 16 * group + Ops::kOutputs * part);
    } else if constexpr (Format::kScale == GroupScale::kSuper) {
      const std::byte* scales = unit + 16 * group + Ops::kOutputs * part;
      const Floats own = Format::kMinimum ? Ops::UnsignedBytes(scales) : Ops::SignedBytes(scales);
      return Ops::Multiply(own, Ops::HalfScales(super + 2 * Ops::kOutputs * part));
    } else {
      return Ops::HalfScales(unit + 32 * group + 2 * Ops::kOutputs * part);
    }
  }
  static Floats Minima(const std::byte* unit, const std::byte* super, int group, int part) {
    const Floats own = Ops::UnsignedBytes(unit + 32 + 16 * group + Ops::kOutputs * part);
    return Ops::Multiply(own, Ops::HalfScales(super + 32 + 2 * Ops::kOutputs * part));
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
      const std::byte* unit = UnitAt<Format>(w, u);
      const std::byte* super = kHasSuper<Format> ? SuperAt<Format>(w, u) : unit;  // not read by other formats
      if (kPanels == kWidePanels || row == 0) {  // later rows find these weights in a cache
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
          const Ints correction = Format::kMinimum
                                      ? Ops::ZeroInts()
                                      : Ops::Broadcast(a[m] + corrections_at + 4 * (kGroups * u + g));
#pragma GCC unroll 16
          for (int p = 0; p < kWidth; ++p) dots[m][p] = correction;
        }
#pragma GCC unroll 4
        for (int i = 0; i < Format::kGroup / 8; ++i) {
          const int pair = g * Format::kGroup / 8 + i;
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
        Floats scales[kWidth], minima[kWidth];
#pragma GCC unroll 16
        for (int p = 0; p < kWidth; ++p) {
          const int64_t panel_at = p / kParts * t.panel_bytes;
          scales[p] = Scales(unit + panel_at, super + panel_at, g, p % kParts);
          if constexpr (Format::kMinimum)
            minima[p] = Minima(unit + panel_at, super + panel_at, g, p % kParts);
        }
        const int64_t activation_group = (kUnitInputs * u + Format::kGroup * g) / kActivationGroup;
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) {
          const Floats scale = Ops::BroadcastFloat(a[m] + scales_at + 4 * activation_group);
#pragma GCC unroll 16
          for (int p = 0; p < kWidth; ++p) {
            acc[m][p] =
                Ops::MultiplyAdd(Ops::Multiply(Ops::ToFloats(dots[m][p]), scale), scales[p], acc[m][p]);
          }
          if constexpr (Format::kMinimum) {
            const Floats sum = Ops::BroadcastFloat(a[m] + corrections_at + 4 * (kGroups * u + g));
#pragma GCC unroll 16
            for (int p = 0; p < kWidth; ++p) acc[m][p] = Ops::NegativeMultiplyAdd(sum, minima[p], acc[m][p]);
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
