#include "quantizer/panel_product.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "base/check.h"
#include "tensor/dtype.h"

namespace moesaic::quantizer {
namespace {

using tensor::kPanelRows;
using tensor::PackedFormat;

constexpr int kBlock = kPanelBlock;
constexpr int kPairs = kBlock / 2;
constexpr int64_t kPanelBlockFloats = int64_t{kBlock} * kPanelRows;

// 128 values as halves: x = upper + lower, but for 2^-17 of it.
struct Halves {
  uint16_t upper[kBlock], lower[kBlock];
};
static_assert(sizeof(Halves) == kBlock * sizeof(float));

const Halves& HalvesAt(const float* at) { return *reinterpret_cast<const Halves*>(at); }

uint32_t Pair(uint16_t first, uint16_t second) { return first | static_cast<uint32_t>(second) << 16; }

}  // namespace

bool MultipliesHalves(const kernels::ExecContext& ctx) {
  const auto& choices = ctx.kernels->choices;
  return std::any_of(choices.begin(), choices.end(), [](const kernels::KernelChoice& choice) {
    return choice.op == "gemm_bf16" && choice.isa == runtime::Isa::kAmx;
  });
}

void PutBlock(bool halves, const float* values, float* at) {
  if (!halves) {
    std::copy_n(values, kBlock, at);
    return;
  }
  Halves block;
  for (int i = 0; i < kBlock; ++i) {
    const auto round = [](float x) {
      const auto bits = std::bit_cast<uint32_t>(x);
      return (bits + 0x7fffU + (bits >> 16 & 1U)) >> 16;
    };
    const uint32_t upper = round(values[i]);
    block.upper[i] = static_cast<uint16_t>(upper);
    block.lower[i] = static_cast<uint16_t>(round(values[i] - std::bit_cast<float>(upper << 16)));
  }
  std::memcpy(at, &block, sizeof block);
}

void GetBlock(bool halves, const float* at, float* values) {
  if (!halves) {
    std::copy_n(at, kBlock, values);
    return;
  }
  Halves block;
  std::memcpy(&block, at, sizeof block);
  for (int i = 0; i < kBlock; ++i) {
    values[i] = tensor::ToFloat(tensor::BF16{block.upper[i]}) + tensor::ToFloat(tensor::BF16{block.lower[i]});
  }
}

float* PackedPanels::Block(int panel, int first, int part) {
  const int piece = first / kInner * kInner;
  return memory_.data() + part * part_floats() + int64_t{piece} * kBlock +
         (int64_t{panel} * PieceHeight(piece) + (first - piece)) * kPanelRows;
}

void PackedPanels::PackColumns(const kernels::ExecContext& ctx, const float* at, int64_t stride, int inner) {
  MOESAIC_CHECK_LE(Floats(inner), std::ssize(memory_));
  inner_ = inner;
  ctx.pool->Run(inner / kBlock, [&](int64_t block, int) {
    const int first = static_cast<int>(block) * kBlock;
    for (int panel = 0; panel < kPanels; ++panel) {
      const int column = panel * kPanelRows;
      if (!halves_) {
        float* to = Block(panel, first, 0);
        for (int i = 0; i < kBlock; ++i) {
          std::copy_n(at + (first + i) * stride + column, kPanelRows, to + i * kPanelRows);
        }
        continue;
      }
      auto* upper = reinterpret_cast<uint32_t*>(Block(panel, first, 0));
      auto* lower = reinterpret_cast<uint32_t*>(Block(panel, first, 1));
      for (int p = 0; p < kPairs; ++p) {
        const Halves &a = HalvesAt(at + (first + 2 * p) * stride),
                     &b = HalvesAt(at + (first + 2 * p + 1) * stride);
        for (int c = 0; c < kPanelRows; ++c) {
          upper[p * kPanelRows + c] = Pair(a.upper[column + c], b.upper[column + c]);
          lower[p * kPanelRows + c] = Pair(a.lower[column + c], b.lower[column + c]);
        }
      }
      std::copy_n(upper, kPairs * kPanelRows, upper + kPairs * kPanelRows);
      std::copy_n(lower, kPairs * kPanelRows, lower + kPairs * kPanelRows);
    }
  });
}

void PackedPanels::PackTransposed(const kernels::ExecContext& ctx, const float* rows, int64_t stride,
                                  int inner, bool negative) {
  MOESAIC_CHECK_LE(Floats(inner), std::ssize(memory_));
  inner_ = inner;
  const float sign = negative ? -1.0F : 1.0F;
  const uint32_t flip = negative ? 0x80008000U : 0;
  ctx.pool->Run(inner / kBlock, [&](int64_t block, int) {
    const int first = static_cast<int>(block) * kBlock;
    for (int panel = 0; panel < kPanels; ++panel) {
      const float* from = rows + panel * kPanelRows * stride + first;
      if (!halves_) {
        float* to = Block(panel, first, 0);
        for (int i = 0; i < kBlock; ++i) {
          for (int c = 0; c < kPanelRows; ++c) to[i * kPanelRows + c] = sign * from[c * stride + i];
        }
        continue;
      }
      auto* upper = reinterpret_cast<uint32_t*>(Block(panel, first, 0));
      auto* lower = reinterpret_cast<uint32_t*>(Block(panel, first, 1));
      for (int c = 0; c < kPanelRows; ++c) {
        const Halves& row = HalvesAt(from + c * stride);
        for (int p = 0; p < kPairs; ++p) {
          upper[p * kPanelRows + c] = Pair(row.upper[2 * p], row.upper[2 * p + 1]) ^ flip;
          lower[p * kPanelRows + c] = Pair(row.lower[2 * p], row.lower[2 * p + 1]) ^ flip;
        }
      }
      std::copy_n(upper, kPairs * kPanelRows, upper + kPairs * kPanelRows);
      std::copy_n(lower, kPairs * kPanelRows, lower + kPairs * kPanelRows);
    }
  });
}

void PackedPanels::Multiply(const kernels::ExecContext& ctx, const float* a, int64_t a_stride, int rows,
                            bool accumulate, float* c, int64_t c_stride) const {
  static_assert(kPanelBlockFloats * sizeof(float) == 2 * kPairs * kPanelRows * sizeof(uint32_t));
  for (int first = 0; first < inner_; first += kInner) {
    const int height = PieceHeight(first);
    kernels::GemmTile tile{};
    tile.a = reinterpret_cast<const std::byte*>(a + first);
    tile.a_stride = a_stride * int64_t{sizeof(float)};
    tile.panel_bytes = int64_t{height} * kPanelRows * int64_t{sizeof(float)};
    tile.c = c;
    tile.c_stride = c_stride;
    tile.m = rows;
    tile.k_padded = halves_ ? 2 * height : height;
    tile.panels = kPanels;
    tile.columns = kBlock;
    const auto run =
        ctx.kernels->gemm[static_cast<int>(halves_ ? PackedFormat::kBF16 : PackedFormat::kF32)].tile;
    for (int part = 0; part < (halves_ ? 2 : 1); ++part) {
      tile.w =
          reinterpret_cast<const std::byte*>(memory_.data() + part * part_floats() + int64_t{first} * kBlock);
      tile.accumulate = accumulate || first > 0 || part > 0;
      run(tile);
    }
  }
}

}  // namespace moesaic::quantizer
