#include "quantizer/gptq/panel_product.h"

#include <algorithm>
#include <string>

#include "base/check.h"
#include "kernels/kernel_table.h"
#include "kernels/micro_kernels.h"
#include "tensor/dtype.h"

namespace moesaic::quantizer {
namespace {

using tensor::BF16;
using tensor::kPanelRows;
using tensor::PackedFormat;

constexpr int kProductBlock = kPanelBlock;

const BF16* Halves(const float* at) { return reinterpret_cast<const BF16*>(at); }
BF16* Halves(float* at) { return reinterpret_cast<BF16*>(at); }

// Packs columns of 16 rows in pairs, [count / 2][16] words.
void PackPairs(const BF16* rows, int64_t stride, int count, uint32_t flip, uint32_t* to) {
  for (int c = 0; c < kPanelRows; ++c) {
    const BF16* row = rows + c * stride;
    for (int p = 0; p < count / 2; ++p) {
      to[p * kPanelRows + c] = (row[2 * p].bits | static_cast<uint32_t>(row[2 * p + 1].bits) << 16) ^ flip;
    }
  }
}

}  // namespace

bool MultipliesHalves(const kernels::ExecContext& ctx) {
  const auto& choices = ctx.kernels->choices;
  return std::any_of(choices.begin(), choices.end(), [](const kernels::KernelChoice& choice) {
    return choice.op == "gemm_bf16" && choice.isa == runtime::Isa::kAmx;
  });
}

void StripRows::Put(const float* values, int column, float* row) const {
  if (!halves) {
    std::copy_n(values, kProductBlock, row + column);
    return;
  }
  BF16* upper = Halves(row + Begin(column)) + (column - Begin(column));
  BF16* lower = upper + Width(column);
  for (int i = 0; i < kProductBlock; ++i) {
    upper[i] = tensor::ToBF16(values[i]);
    lower[i] = tensor::ToBF16(values[i] - tensor::ToFloat(upper[i]));
  }
}

void StripRows::Get(const float* row, int column, float* values) const {
  if (!halves) {
    std::copy_n(row + column, kProductBlock, values);
    return;
  }
  const BF16* upper = Halves(row + Begin(column)) + (column - Begin(column));
  const BF16* lower = upper + Width(column);
  for (int i = 0; i < kProductBlock; ++i) values[i] = tensor::ToFloat(upper[i]) + tensor::ToFloat(lower[i]);
}

PackedPanels::Piece PackedPanels::PieceAt(int column) const {
  return {column, std::min(last_, rows_.Begin(column) + kStrip) - column};
}

void PackedPanels::PackTransposed(const kernels::ExecContext& ctx, const float* rows, int64_t stride,
                                  int columns, int first, int last, bool negative) {
  MOESAIC_CHECK_LE(Floats(last - first, columns), std::ssize(memory_));
  first_ = first;
  last_ = last;
  columns_ = columns;
  const int panels = columns / kPanelRows;
  ctx.pool->Run((last - first) / kProductBlock, [&](int64_t block, int) {
    const int column = first + static_cast<int>(block) * kProductBlock;
    const Piece piece = PieceAt(std::max(first_, rows_.Begin(column)));
    // Numbers before it in a panel with one number per column.
    const int64_t before = int64_t{column - piece.first} * kPanelRows;
    for (int panel = 0; panel < panels; ++panel) {
      const float* from = rows + panel * kPanelRows * stride;
      const int64_t start = int64_t{panel} * piece.height * kPanelRows + before;
      if (!rows_.halves) {
        const float sign = negative ? -1.0F : 1.0F;
        float* to = At(piece) + start;
        for (int i = 0; i < kProductBlock; ++i) {
          for (int c = 0; c < kPanelRows; ++c) {
            to[i * kPanelRows + c] = sign * from[c * stride + column + i];
          }
        }
        continue;
      }
      const BF16* upper = Halves(from + rows_.Begin(column)) + (column - rows_.Begin(column));
      auto* to = reinterpret_cast<uint32_t*>(At(piece)) + start / 2;
      const uint32_t flip = negative ? 0x80008000U : 0;
      PackPairs(upper, 2 * stride, kProductBlock, flip, to);
      PackPairs(upper + rows_.Width(column), 2 * stride, kProductBlock, flip,
                to + int64_t{piece.height} * columns_ / 2);
    }
  });
}

void PackedPanels::Multiply(const kernels::ExecContext& ctx, const float* a, int64_t a_stride, int rows,
                            bool accumulate, float* c, int64_t c_stride) const {
  const auto format = rows_.halves ? PackedFormat::kBF16 : PackedFormat::kF32;
  const auto run = ctx.kernels->gemm[static_cast<int>(format)].tile;
  for (int first = first_; first < last_; first += PieceAt(first).height) {
    const Piece piece = PieceAt(first);
    const auto size = static_cast<int64_t>(rows_.halves ? sizeof(BF16) : sizeof(float));
    const auto* w = reinterpret_cast<const std::byte*>(At(piece));
    const int strip = rows_.Begin(first);
    const auto* left = reinterpret_cast<const std::byte*>(a + strip) + (first - strip) * size;
    kernels::GemmTile tile{};
    tile.a = left;
    tile.a_stride = a_stride * int64_t{sizeof(float)};
    tile.w = w;
    tile.panel_bytes = piece.height * kPanelRows * size;
    tile.c = c;
    tile.c_stride = c_stride;
    tile.m = rows;
    tile.k_padded = piece.height;
    tile.panels = columns_ / kPanelRows;
    tile.columns = columns_;
    tile.accumulate = accumulate || first > first_;
    run(tile);
    if (!rows_.halves) continue;
    tile.accumulate = true;
    tile.a = left + rows_.Width(first) * size;
    run(tile);
    tile.a = left;
    tile.w = w + int64_t{piece.height} * columns_ * size;
    run(tile);
  }
}

}  // namespace moesaic::quantizer
