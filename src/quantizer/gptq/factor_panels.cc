// Memory layout of a factor, and products with it.
#include <algorithm>

#include "base/check.h"
#include "kernels/exec_context.h"
#include "kernels/kernel_table.h"
#include "kernels/micro_kernels.h"
#include "quantizer/gptq/factor.h"
#include "tensor/packed.h"

namespace moesaic::quantizer {
namespace {

using tensor::kPanelRows;

constexpr int kPanelColumns = kFactorBlock;

}  // namespace

int64_t FactorPanels::RowElements(int row) const { return int64_t{columns(row)} * (k_padded_ - row); }

int64_t FactorPanels::RowOffset(int row) const {
  const int64_t block = row / kWideBlock;
  return kWideBlock * (block * k_padded_ - kWideBlock * (block * (block - 1) / 2));
}

int64_t FactorPanels::Piece(int begin, int row) const {
  const int rows = row / kWideBlock * kWideBlock;
  const int64_t inside =
      begin == rows ? int64_t{row - rows} * columns(begin) : int64_t{begin - rows} * columns(rows);
  return RowOffset(rows) + inside;
}

int64_t FactorPanels::Bytes(int k_padded) {
  FactorPanels shape;
  shape.k_padded_ = k_padded;
  const int last = (k_padded - 1) / kWideBlock * kWideBlock;
  return (shape.RowOffset(last) + shape.RowElements(last)) * int64_t{sizeof(tensor::BF16)};
}

StatusOr<std::byte*> FactorPanels::Resize(int k_padded, int64_t bytes) {
  MOESAIC_CHECK_GE(bytes, Bytes(k_padded));
  k_padded_ = k_padded;
  RETURN_IF_ERROR(memory_.Reserve(static_cast<size_t>(bytes), /*huge=*/true));
  return memory_.data();
}

void FactorPanels::Trim() { memory_.Trim(static_cast<size_t>(Bytes(k_padded_))); }

void FactorPanels::Put(int row, int column, const float (*block)[kFactorBlock], tensor::BF16* rows) const {
  const int begin = column / kWideBlock * kWideBlock, first = row / kWideBlock * kWideBlock;
  const int height = first < begin ? kWideBlock : kPanelColumns, piece = row / height * height;
  for (int p = 0; p < kPanelColumns / kPanelRows; ++p) {
    tensor::BF16* to = rows + (Piece(begin, piece) - RowOffset(first)) +
                       int64_t{(column - begin) / kPanelRows + p} * height * kPanelRows +
                       int64_t{row - piece} * kPanelRows;
    for (int i = 0; i < kPanelColumns; ++i) {
      const float* from = block[i] + p * kPanelRows;
      for (int c = 0; c < kPanelRows; ++c) {
        to[(i / 2 * kPanelRows + c) * 2 + i % 2] = tensor::ToBF16(from[c]);
      }
    }
  }
}

void FactorPanels::Product(const kernels::ExecContext& ctx, int piece, int height, int column, int columns,
                           const tensor::BF16* errors, int64_t stride, int rows, bool accumulate,
                           float* out) const {
  const int begin = column / kWideBlock * kWideBlock;
  constexpr int64_t kSize = sizeof(tensor::BF16);
  kernels::GemmTile tile{};
  tile.a = reinterpret_cast<const std::byte*>(errors + piece);
  tile.a_stride = stride * kSize;
  tile.w = memory_.data() + (Piece(begin, piece) + int64_t{column - begin} * height) * kSize;
  tile.panel_bytes = height * kPanelRows * kSize;
  tile.c = out + (column - begin);
  tile.c_stride = kWideBlock;
  tile.m = rows;
  tile.k_padded = height;
  tile.columns = columns;
  tile.panels = columns / kPanelRows;
  tile.accumulate = accumulate;
  ctx.kernels->gemm[static_cast<int>(tensor::PackedFormat::kBF16)].tile(tile);
}

void FactorPanels::Multiply(const kernels::ExecContext& ctx, int begin, const tensor::BF16* errors,
                            int64_t stride, int rows, float* out) const {
  if (begin == 0) std::fill_n(out, int64_t{rows} * kWideBlock, 0.0F);
  for (int piece = 0; piece < begin; piece += kWideBlock) {
    Product(ctx, piece, kWideBlock, begin, columns(begin), errors, stride, rows, /*accumulate=*/piece > 0,
            out);
  }
}

void FactorPanels::AddInside(const kernels::ExecContext& ctx, int column, int end, const tensor::BF16* errors,
                             int64_t stride, int rows, float* out) const {
  for (int piece = column / kWideBlock * kWideBlock; piece < end; piece += kPanelColumns) {
    Product(ctx, piece, kPanelColumns, column, kPanelColumns, errors, stride, rows, /*accumulate=*/true, out);
  }
}

}  // namespace moesaic::quantizer
