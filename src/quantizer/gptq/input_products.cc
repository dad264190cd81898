#include "quantizer/gptq/input_products.h"

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "base/round.h"
#include "kernels/kernel_table.h"
#include "kernels/micro_kernels.h"
#include "tensor/packed.h"

namespace moesaic::quantizer {
namespace {

using tensor::kPanelRows;
using tensor::PackedFormat;
using Region = ProductSums::Region;

// Tokens multiplied at once. Sums are loaded and stored once per chunk.
constexpr int kChunk = 2048;
// Tokens per kernel call. 32 inputs of them (32 KiB in bf16) stay in the L1 cache while the rows of a task
// are streamed from the L2 cache.
constexpr int kPiece = kProductTokens;
constexpr int kRoundedTokens = 256;  // tokens rounded at once
constexpr int kLargeTask = 512, kSmallTask = 256;

static_assert(kChunk % kRoundedTokens == 0 && kRoundedTokens % (2 * kPanelRows) == 0 && kChunk % kPiece == 0);

// Rounds tokens [first, first + count) to bf16 [to.size() / row_inputs][row_inputs] with ordered inputs.
// Tokens past count are 0.
void RoundTokens(const kernels::ExecContext& ctx, const TokenRows& tokens, int first, int count, int k,
                 std::span<const int> order, int row_inputs, std::span<uint16_t> to) {
  const auto prepare = ctx.kernels->gemm[static_cast<int>(PackedFormat::kBF16)].prepare;
  ctx.pool->Run(std::ssize(to) / row_inputs, [&](int64_t t, int) {
    uint16_t* row = to.data() + t * row_inputs;
    if (t >= count) {
      std::fill_n(row, row_inputs, uint16_t{0});
      return;
    }
    const int64_t at = (first + t) * tokens.stride;
    if (tokens.f32 != nullptr && order.empty()) {
      prepare(tokens.f32 + at, k, row_inputs, {}, reinterpret_cast<std::byte*>(row));
      return;
    }
    std::vector<float> ordered(k);
    for (int i = 0; i < k; ++i) {
      const int64_t from = at + (order.empty() ? i : order[i]);
      ordered[i] = tokens.bf16 != nullptr ? tensor::ToFloat(tokens.bf16[from]) : tokens.f32[from];
    }
    prepare(ordered.data(), k, row_inputs, {}, reinterpret_cast<std::byte*>(row));
  });
}

// Operands of one pass: tokens in pairs, inputs in panels of 16.
struct Operands {
  int tokens = 0, panels = 0;  // tokens padded to 64
  int64_t row_bytes = 0;       // between rows of left
  std::span<std::byte> left;   // [panels * 16][row_bytes]: rows of inputs
  // [tokens / kPiece][panels][kPiece / 2][16] words in the layout of bf16 weights (tensor/packed.h). The last
  // piece may be shorter.
  std::span<std::byte> right;

  int PieceTokens(int piece) const { return std::min(kPiece, tokens - piece); }
  int64_t PanelBytes(int piece) const { return int64_t{PieceTokens(piece)} * kPanelRows * 2; }
  std::byte* Panel(int piece, int panel) const {
    return right.data() + int64_t{piece} * panels * kPanelRows * 2 + panel * PanelBytes(piece);
  }
  void Pack(const uint16_t* rounded, int row_inputs, int first, int count, int panel) const;
};

// Packs 16 inputs of tokens [first, first + count), all in one piece, for both operands.
void Operands::Pack(const uint16_t* rounded, int row_inputs, int first, int count, int panel) const {
  const int input = panel * kPanelRows, piece = first / kPiece * kPiece;
  auto* right_words = reinterpret_cast<uint32_t*>(Panel(piece, panel)) + (first - piece) / 2 * kPanelRows;
  std::byte* left_rows = left.data() + input * row_bytes;
  for (int q = 0; q < count / 2; q += kPanelRows) {
    uint32_t* square = right_words + q * kPanelRows;
    for (int p = 0; p < kPanelRows; ++p) {
      const uint16_t* low = rounded + int64_t{2} * (q + p) * row_inputs + input;
      const uint16_t* high = low + row_inputs;
      for (int c = 0; c < kPanelRows; ++c) {
        square[p * kPanelRows + c] = low[c] | static_cast<uint32_t>(high[c]) << 16;
      }
    }
    // Transposes the same words: a square of 16 cache lines to 16 others.
    for (int c = 0; c < kPanelRows; ++c) {
      auto* line = reinterpret_cast<uint32_t*>(left_rows + c * row_bytes) + first / 2 + q;
      for (int p = 0; p < kPanelRows; ++p) line[p] = square[p * kPanelRows + c];
    }
  }
}

// A square of pairs (i, j) that one task sums.
struct Task {
  int row, first;
};

std::vector<Task> TasksOf(const ProductSums& sums, int side) {
  std::vector<Task> tasks;
  for (int row = 0; row < sums.k; row += side) {
    const int begin = sums.region == Region::kLower ? 0 : row;
    const int end = sums.region == Region::kUpper ? sums.k : row + 1;
    for (int first = begin; first < end; first += side) tasks.push_back({row, first});
  }
  return tasks;
}

// Adds the products of x.
void Accumulate(const kernels::ExecContext& ctx, const Operands& x, const ProductSums& sums) {
  const int k = sums.k;
  const int side = sums.region == Region::kDiagonal         ? kDiagonalRows
                   : k >= 8 * kSmallTask * ctx.pool->size() ? kLargeTask
                                                            : kSmallTask;
  const std::vector<Task> tasks = TasksOf(sums, side);
  const auto multiply = ctx.kernels->gemm[static_cast<int>(PackedFormat::kBF16)].tile;
  ctx.pool->Run(std::ssize(tasks), [&](int64_t i, int) {
    const Task& task = tasks[i];
    const int step = task.first == task.row ? kDiagonalRows : side;
    for (int row = task.row; row < std::min(task.row + side, k); row += step) {
      const int rows = std::min(step, k - row);
      const int begin = sums.region == Region::kLower ? task.first : std::max(task.first, row);
      const int end = std::min(task.first + side, sums.region == Region::kUpper ? k : row + rows);
      for (int piece = 0; piece < x.tokens; piece += kPiece) {
        kernels::GemmTile tile{};
        tile.a = x.left.data() + row * x.row_bytes + int64_t{2} * piece;
        tile.a_stride = x.row_bytes;
        tile.w = x.Panel(piece, begin / kPanelRows);
        tile.panel_bytes = x.PanelBytes(piece);
        tile.c = sums.row(row) + begin;
        tile.c_stride = sums.stride(row);
        tile.m = rows;
        tile.k_padded = x.PieceTokens(piece);
        tile.columns = end - begin;
        tile.panels = base::CeilDiv(tile.columns, kPanelRows);
        tile.accumulate = true;
        multiply(tile);
      }
    }
  });
}

}  // namespace

int64_t AddProductsBytes(int64_t k, int64_t tokens) {
  // Both operands, a cache line, and the rounded tokens.
  return base::RoundUp(k, tensor::kPackedKUnit) * (4 * std::min<int64_t>(tokens, kChunk) + 512 + 512);
}

void AddProducts(const kernels::ExecContext& ctx, const TokenRows& tokens, std::span<const int> order,
                 const ProductSums& sums) {
  MOESAIC_CHECK((tokens.f32 != nullptr) != (tokens.bf16 != nullptr) || tokens.count == 0);
  const int k = sums.k, row_inputs = base::RoundUp(k, tensor::kPackedKUnit);
  for (int first = 0; first < tokens.count; first += kChunk) {
    const int count = std::min(kChunk, tokens.count - first);
    const size_t mark = ctx.scratch->Mark();
    Operands x;
    x.tokens = base::RoundUp(count, tensor::kPackedKUnit);
    x.panels = base::CeilDiv(k, kPanelRows);
    x.row_bytes = int64_t{x.tokens} * 2 | 64;
    x.left = ctx.scratch->Take<std::byte>(x.panels * kPanelRows * x.row_bytes);
    x.right = ctx.scratch->Take<std::byte>(size_t(x.panels) * kPanelRows * x.tokens * 2);
    const auto rounded = ctx.scratch->Take<uint16_t>(size_t(kRoundedTokens) * row_inputs);
    for (int at = 0; at < x.tokens; at += kRoundedTokens) {
      const int padded = std::min(kRoundedTokens, x.tokens - at);
      RoundTokens(ctx, tokens, first + at, std::min(padded, count - at), k, order, row_inputs,
                  rounded.first(size_t(padded) * row_inputs));
      ctx.pool->Run(x.panels, [&](int64_t panel, int) {
        x.Pack(rounded.data(), row_inputs, at, padded, static_cast<int>(panel));
      });
    }
    Accumulate(ctx, x, sums);
    ctx.scratch->Rewind(mark);
  }
}

}  // namespace moesaic::quantizer
