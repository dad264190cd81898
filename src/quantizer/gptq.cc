#include "quantizer/gptq.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/check.h"
#include "quantizer/panel_product.h"

namespace moesaic::quantizer {
namespace {

constexpr int kBlock = kFactorBlock;
constexpr int kRows = kernels::kRoundBlockRows;
constexpr int kSampleRows = 64;
// A task's rows share the right operand's piece in the cache; 64 alone would wait for the next piece.
constexpr int kMostTiles = 4;

int64_t ErrorStride(int k_padded) { return k_padded + 16; }  // an odd number of cache lines

// The factor's block on the diagonal, turned: [c][i] is R[begin + i][begin + c].
void TurnDiagonal(const HessianFactor& factor, int begin, float* to) {
  for (int i = 0; i < kBlock; ++i) {
    float row[kBlock];
    GetBlock(factor.halves, factor.row(begin + i) + begin, row);
    for (int c = 0; c < kBlock; ++c) to[c * kBlock + i] = row[c];
  }
}

// Scales by group of inputs, [groups][rows padded to 64]: a column's stand one after another.
std::vector<float> ScalesByGroup(const QuantizedMatrix& matrix, int padded_rows) {
  const int inputs = matrix.grid.group_inputs(matrix.k), groups = matrix.grid.scale_columns(matrix.k);
  std::vector<float> scales(static_cast<size_t>(groups) * padded_rows, 1.0F);
  for (int r = 0; r < matrix.n; ++r) {
    for (int g = 0; g < groups; ++g) scales[int64_t{g} * padded_rows + r] = matrix.Scale(r, g * inputs);
  }
  return scales;
}

// What one task works on: feedback of its rows, then for 64 of them at a time the columns of a block, each
// with its rows side by side.
struct Tile {
  alignas(64) float feedback_rows[kMostTiles * kRows][kBlock];
  alignas(64) float values[kBlock][kRows], feedback[kBlock][kRows], errors[kBlock][kRows];
  alignas(64) uint8_t codes[kBlock][kRows];
};

class Rounder {
 public:
  Rounder(const kernels::ExecContext& ctx, const float* rows, const HessianFactor& factor,
          QuantizedMatrix* result)
      : ctx_(ctx),
        rows_(rows),
        factor_(factor),
        result_(result),
        tiles_((result->n + kRows - 1) / kRows),
        tiles_per_task_(std::clamp(tiles_ / (2 * ctx.pool->size()), 1, kMostTiles)),
        losses_(static_cast<size_t>(tiles_) * kRows),
        scales_(ScalesByGroup(*result, tiles_ * kRows)),
        errors_(ctx.scratch->Take<float>(tiles_ * kRows * ErrorStride(factor.k_padded))),
        before_(factor.halves, ctx.scratch->Take<float>(PackedPanels::Floats(factor.k_padded))),
        diagonal_(ctx.scratch->Take<float>(kBlock * kBlock)),
        work_(ctx.scratch->Take<Tile>(ctx.pool->size())) {}

  double Run() {
    PutWeightsInOrder();
    for (int begin = 0; begin < factor_.k_padded; begin += kBlock) {
      before_.PackColumns(ctx_, factor_.row(0) + begin, factor_.stride, begin);
      TurnDiagonal(factor_, begin, diagonal_.data());
      ctx_.pool->Run((tiles_ + tiles_per_task_ - 1) / tiles_per_task_, [&](int64_t task, int worker) {
        RoundRows(static_cast<int>(task) * tiles_per_task_, begin, &work_[worker]);
      });
    }
    PutCodesBack();
    return std::accumulate(losses_.begin(), losses_.end(), 0.0);
  }

  // Errors of a row in the factor's order, [k_padded], by PutBlock.
  const float* errors(int row) const { return errors_.data() + row * ErrorStride(factor_.k_padded); }

 private:
  // Weights wait in order where their errors will stand: a row is read while it is in the cache, not a line
  // for every value.
  void PutWeightsInOrder() {
    ctx_.pool->Run(result_->n, [&](int64_t r, int) {
      float* to = errors_.data() + r * ErrorStride(factor_.k_padded);
      for (int p = 0; p < factor_.k; ++p) to[p] = rows_[r * factor_.k + factor_.order[p]];
    });
  }

  // Codes are found in order.
  void PutCodesBack() {
    ctx_.pool->Run(result_->n, [&](int64_t r, int) {
      uint8_t* codes = result_->codes.data() + r * factor_.k;
      const std::vector<uint8_t> ordered(codes, codes + factor_.k);
      for (int p = 0; p < factor_.k; ++p) codes[factor_.order[p]] = ordered[p];
    });
  }

  // Tiles [first_tile, first_tile + tiles_per_task_) of the block at `begin`.
  void RoundRows(int first_tile, int begin, Tile* tile) {
    const int end = std::min(tiles_, first_tile + tiles_per_task_), first = first_tile * kRows;
    const int rows = std::min(result_->n, end * kRows) - first;
    const int64_t stride = ErrorStride(factor_.k_padded);
    if (begin > 0) {
      before_.Multiply(ctx_, errors_.data() + first * stride, stride, rows, false, tile->feedback_rows[0],
                       kBlock);
    } else {
      std::memset(tile->feedback_rows, 0, sizeof tile->feedback_rows);
    }
    for (int t = first_tile; t < end; ++t) {
      RoundTile(t * kRows, begin, &tile->feedback_rows[(t - first_tile) * kRows], tile);
    }
  }

  // Up to 64 rows from `first` on.
  void RoundTile(int first, int begin, const float (*feedback_rows)[kBlock], Tile* tile) {
    const int rows = std::min(kRows, result_->n - first), k = factor_.k;
    const int64_t stride = ErrorStride(factor_.k_padded);
    float* errors = errors_.data() + first * stride;
    if (rows < kRows) {  // rows that are not there weigh nothing
      std::memset(tile->values, 0, sizeof tile->values);
      std::memset(tile->feedback, 0, sizeof tile->feedback);
    }
    const int columns = std::min(kBlock, k - begin), group = result_->grid.group_inputs(k);
    const float* scales[kBlock];
    for (int c = 0; c < kBlock; ++c) {
      const int input = factor_.order[begin + std::min(c, columns - 1)];
      scales[c] = scales_.data() + int64_t{input / group} * tiles_ * kRows + first;
    }
    for (int r = 0; r < rows; ++r) {
      const float* row = errors + r * stride + begin;
      for (int c = 0; c < columns; ++c) tile->values[c][r] = row[c];
      for (int c = 0; c < columns; ++c) tile->feedback[c][r] = feedback_rows[r][c];
    }
    ctx_.kernels->rounding[static_cast<int>(result_->grid.numbers())].block(
        {.columns = columns,
         .values = tile->values[0],
         .feedback = tile->feedback[0],
         .scales = scales,
         .factor = diagonal_.data(),
         .factor_stride = kBlock,
         .errors = tile->errors[0],
         .codes = tile->codes[0],
         .losses = losses_.data() + first});
    for (int r = 0; r < rows; ++r) {
      float row[kBlock] = {};
      for (int c = 0; c < columns; ++c) row[c] = tile->errors[c][r];
      PutBlock(factor_.halves, row, errors + r * stride + begin);
      uint8_t* codes = result_->codes.data() + int64_t{first + r} * k + begin;
      for (int c = 0; c < columns; ++c) codes[c] = tile->codes[c][r];
    }
  }

  const kernels::ExecContext& ctx_;
  const float* rows_;
  const HessianFactor& factor_;
  QuantizedMatrix* result_;
  int tiles_, tiles_per_task_;
  std::vector<float> losses_;  // of each row
  std::vector<float> scales_;
  std::span<float> errors_;
  PackedPanels before_;
  std::span<float> diagonal_;
  std::span<Tile> work_;  // of each worker
};

// Sums of (e R)^2 over rows of errors in the factor's order, by PutBlock.
double LossInOrder(const kernels::ExecContext& ctx, const HessianFactor& factor, const float* errors,
                   int64_t stride, int count) {
  const size_t mark = ctx.scratch->Mark();
  PackedPanels right(factor.halves, ctx.scratch->Take<float>(PackedPanels::Floats(factor.k_padded)));
  const int tasks = (count + kRows - 1) / kRows;
  std::vector<double> losses(static_cast<size_t>(tasks) * kRows);
  for (int begin = 0; begin < factor.k_padded; begin += kBlock) {
    right.PackColumns(ctx, factor.row(0) + begin, factor.stride, begin + kBlock);
    ctx.pool->Run(tasks, [&](int64_t task, int) {
      const int first = static_cast<int>(task) * kRows, rows = std::min(kRows, count - first);
      alignas(64) float sums[kRows][kBlock];
      right.Multiply(ctx, errors + first * stride, stride, rows, false, sums[0], kBlock);
      for (int r = 0; r < rows; ++r) {
        for (const float sum : sums[r]) losses[first + r] += double{sum} * sum;
      }
    });
  }
  ctx.scratch->Rewind(mark);
  return std::accumulate(losses.begin(), losses.end(), 0.0);
}

void PutInOrder(const HessianFactor& factor, const float* from, float* to) {
  for (int begin = 0; begin < factor.k_padded; begin += kBlock) {
    float block[kBlock] = {};
    for (int c = 0; c < std::min(kBlock, factor.k - begin); ++c) block[c] = from[factor.order[begin + c]];
    PutBlock(factor.halves, block, to + begin);
  }
}

// GPTQ's loss over that of the nearest codes with the same scales, on some of the rows.
double OfNearest(const kernels::ExecContext& ctx, const HessianFactor& factor, const float* rows,
                 const Rounder& rounder, const QuantizedMatrix& matrix) {
  const int sample = std::min(kSampleRows, matrix.n), k = matrix.k, group = matrix.grid.group_inputs(k);
  const int64_t stride = ErrorStride(factor.k_padded);
  std::vector<float> ours(sample * stride), nearest(sample * stride), errors(k), row_values(k);
  const kernels::Rounding& rounding = ctx.kernels->rounding[static_cast<int>(matrix.grid.numbers())];
  QuantizedMatrix one{.grid = matrix.grid, .n = 1, .k = k, .codes = std::vector<uint8_t>(k), .scales = {}};
  one.global_scale = matrix.global_scale;
  const int columns = matrix.grid.scale_columns(k);
  for (int s = 0; s < sample; ++s) {
    const auto r = static_cast<int>(int64_t{s} * matrix.n / sample);
    const float* row = rows + int64_t{r} * k;
    const auto scales = matrix.scales.begin() + int64_t{r / matrix.grid.group_outputs()} * columns;
    one.scales.assign(scales, scales + columns);
    for (int c = 0; c < k; c += group) {
      rounding.encode(row + c, std::min(group, k - c), one.Scale(0, c), one.codes.data() + c);
    }
    Dequantize(one, 0, 1, row_values.data());
    for (int c = 0; c < k; ++c) errors[c] = row[c] - row_values[c];
    PutInOrder(factor, errors.data(), nearest.data() + s * stride);
    std::copy_n(rounder.errors(r), factor.k_padded, ours.data() + s * stride);
  }
  const double before = LossInOrder(ctx, factor, nearest.data(), stride, sample);
  return before > 0 ? LossInOrder(ctx, factor, ours.data(), stride, sample) / before : 1;
}

}  // namespace

StatusOr<QuantizedMatrix> RoundByGptq(const kernels::ExecContext& ctx, const Grid& grid, const float* rows,
                                      int n, int k, const HessianFactor& factor, const ScaleSearch& search,
                                      GptqReport* report) {
  MOESAIC_CHECK_EQ(factor.k, k);
  MOESAIC_CHECK(factor.halves == MultipliesHalves(ctx));
  ASSIGN_OR_RETURN(QuantizedMatrix result, ChooseScales(ctx, grid, rows, n, k, search));
  result.codes.resize(static_cast<size_t>(n) * k);
  const size_t mark = ctx.scratch->Mark();
  {
    Rounder rounder(ctx, rows, factor, &result);
    report->loss = rounder.Run();
    report->of_nearest = OfNearest(ctx, factor, rows, rounder, result);
  }
  ctx.scratch->Rewind(mark);
  return result;
}

int64_t GptqBytes(const Grid& grid, int n, int k, int threads) {
  const int64_t k_padded = (k + kBlock - 1) / kBlock * kBlock, rows = (n + kRows - 1) / kRows * kRows;
  const int64_t floats = (rows + 2 * kSampleRows) * ErrorStride(static_cast<int>(k_padded)) +
                         2 * PackedPanels::Floats(static_cast<int>(k_padded)) +
                         rows * (grid.scale_columns(k) + 1) + kBlock * kBlock;
  return floats * int64_t{sizeof(float)} + threads * int64_t{sizeof(Tile)};
}

double OutputLoss(const kernels::ExecContext& ctx, const HessianFactor& factor, const float* errors,
                  int count) {
  const size_t mark = ctx.scratch->Mark();
  const int64_t stride = ErrorStride(factor.k_padded);
  const std::span<float> ordered = ctx.scratch->Take<float>(count * stride);
  ctx.pool->Run(
      count, [&](int64_t r, int) { PutInOrder(factor, errors + r * factor.k, ordered.data() + r * stride); });
  const double loss = LossInOrder(ctx, factor, ordered.data(), stride, count);
  ctx.scratch->Rewind(mark);
  return loss;
}

}  // namespace moesaic::quantizer
