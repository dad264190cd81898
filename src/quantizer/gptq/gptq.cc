#include "quantizer/gptq/gptq.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/check.h"
#include "base/round.h"
#include "kernels/kernel_table.h"
#include "kernels/rounding.h"

namespace moesaic::quantizer {
namespace {

constexpr int kBlock = kFactorBlock;
constexpr int kRows = kernels::kRoundBlockRows;
// The rows of a task share their reads of the factor, and their corrections fit the L2 cache.
constexpr int kMaxTiles = 4;
constexpr int kTaskRows = kMaxTiles * kRows;

int64_t StrideOf(int k_padded) { return k_padded + 16; }  // floats; an odd number of cache lines

// Working memory of a task: corrections of its rows, then for 64 rows at a time the columns of a block, with
// rows contiguous.
struct Tile {
  alignas(64) float asked[kTaskRows][kWideBlock];
  alignas(64) float values[kBlock][kRows], feedback[kBlock][kRows], errors[kBlock][kRows];
  alignas(64) uint8_t codes[kBlock][kRows];
};

// Transposes to[c][r] = from[r][c] for up to 64 rows and 128 columns, one cache line at a time on both sides.
void Turn(const float* from, int64_t stride, int rows, int columns, float* to) {
  constexpr int kSide = 16;
  for (int r = 0; r < rows; r += kSide) {
    for (int c = 0; c < columns; c += kSide) {
      for (int i = r; i < std::min(r + kSide, rows); ++i) {
        for (int j = c; j < std::min(c + kSide, columns); ++j) to[j * kRows + i] = from[i * stride + j];
      }
    }
  }
}

class Rounder {
 public:
  Rounder(const kernels::ExecContext& ctx, const float* rows, const HessianFactor& factor,
          QuantizedMatrix* result)
      : ctx_(ctx),
        rows_(rows),
        factor_(factor),
        result_(result),
        tiles_(base::CeilDiv(result->n, kRows)),
        tiles_per_task_(std::min(base::CeilDiv(tiles_, ctx.pool->size()), kMaxTiles)),
        losses_(static_cast<size_t>(tiles_) * kRows),
        scales_(ScalesByGroup(*result, tiles_ * kRows)),
        weights_(ctx.scratch->Take<float>(ctx.pool->size() * kTaskRows * StrideOf(factor.k_padded))),
        work_(ctx.scratch->Take<Tile>(ctx.pool->size())) {}

  double Run() {
    ctx_.pool->Run(base::CeilDiv(tiles_, tiles_per_task_), [&](int64_t task, int worker) {
      RoundRows(static_cast<int>(task) * tiles_per_task_, worker);
    });
    return std::accumulate(losses_.begin(), losses_.end(), 0.0);
  }

 private:
  // Rows of a task. Weights are stored in the factor's order. bf16 errors overwrite them from the front: the
  // errors of a block end before the weights of the next one begin.
  struct Rows {
    int first, count;
    float* weights;  // [count][StrideOf(k_padded)]
    int64_t stride;
    tensor::BF16* errors() const { return reinterpret_cast<tensor::BF16*>(weights); }
    int64_t error_stride() const { return 2 * stride; }
  };

  // Rounds tiles [first_tile, first_tile + tiles_per_task_).
  void RoundRows(int first_tile, int worker) {
    Rows rows{.first = first_tile * kRows,
              .count = std::min(result_->n, (first_tile + tiles_per_task_) * kRows) - first_tile * kRows,
              .weights = nullptr,
              .stride = StrideOf(factor_.k_padded)};
    rows.weights = weights_.data() + worker * kTaskRows * rows.stride;
    for (int r = 0; r < rows.count; ++r) {
      const float* from = rows_ + int64_t{rows.first + r} * factor_.k;
      float* to = rows.weights + r * rows.stride;
      for (int p = 0; p < factor_.k; ++p) to[p] = from[factor_.order[p]];
    }
    Tile* tile = &work_[worker];
    for (int begin = 0; begin < factor_.k_padded; begin += kWideBlock) {
      factor_.panels.Multiply(ctx_, begin, rows.errors(), rows.error_stride(), rows.count, tile->asked[0]);
      for (int column = begin; column < begin + factor_.panels.columns(begin); column += kBlock) {
        factor_.panels.AddInside(ctx_, column, column, rows.errors(), rows.error_stride(), rows.count,
                                 tile->asked[0]);
        for (int r = 0; r < rows.count; r += kRows) RoundTile(rows, r, column, tile);
      }
    }
    PutCodesBack(rows);
  }

  // Rounds up to 64 rows from `at` on, columns [begin, begin + 128).
  void RoundTile(const Rows& rows, int at, int begin, Tile* tile) {
    const int count = std::min(kRows, rows.count - at), first = rows.first + at, k = factor_.k;
    if (count < kRows) {  // padding rows have zero weights
      std::memset(tile->values, 0, sizeof tile->values);
      std::memset(tile->feedback, 0, sizeof tile->feedback);
    }
    const int columns = std::min(kBlock, k - begin), group = result_->grid.group_inputs(k);
    const float* scales[kBlock];
    for (int c = 0; c < kBlock; ++c) {
      const int input = factor_.order[begin + std::min(c, columns - 1)];
      scales[c] = scales_.data() + int64_t{input / group} * tiles_ * kRows + first;
    }
    Turn(rows.weights + at * rows.stride + begin, rows.stride, count, columns, tile->values[0]);
    Turn(tile->asked[at] + begin % kWideBlock, kWideBlock, count, columns, tile->feedback[0]);
    ctx_.kernels->rounding[static_cast<int>(result_->grid.numbers())].block(
        {.columns = columns,
         .values = tile->values[0],
         .feedback = tile->feedback[0],
         .scales = scales,
         .factor = factor_.diagonal_block(begin),
         .factor_stride = kBlock,
         .errors = tile->errors[0],
         .codes = tile->codes[0],
         .losses = losses_.data() + first});
    for (int r = 0; r < count; ++r) {
      tensor::BF16* errors = rows.errors() + (at + r) * rows.error_stride() + begin;
      for (int c = 0; c < columns; ++c) errors[c] = tensor::ToBF16(tile->errors[c][r]);
      std::fill(errors + columns, errors + kBlock, tensor::BF16{});
      uint8_t* codes = result_->codes.data() + int64_t{first + r} * k + begin;
      for (int c = 0; c < columns; ++c) codes[c] = tile->codes[c][r];
    }
  }

  // Moves codes from the rounding order to the natural order.
  void PutCodesBack(const Rows& rows) {
    std::vector<uint8_t> ordered(factor_.k);
    for (int r = 0; r < rows.count; ++r) {
      uint8_t* codes = result_->codes.data() + int64_t{rows.first + r} * factor_.k;
      std::copy_n(codes, factor_.k, ordered.data());
      for (int p = 0; p < factor_.k; ++p) codes[factor_.order[p]] = ordered[p];
    }
  }

  const kernels::ExecContext& ctx_;
  const float* rows_;
  const HessianFactor& factor_;
  QuantizedMatrix* result_;
  int tiles_, tiles_per_task_;
  std::vector<float> losses_;  // of each row
  std::vector<float> scales_;
  std::span<float> weights_;  // memory of each worker's task
  std::span<Tile> work_;      // one per worker
};

// Returns e H e^T of each of `count` rows e [k] by input.
std::vector<double> RowLosses(const kernels::ExecContext& ctx, const HessianFactor& factor,
                              const float* errors, int count) {
  const size_t mark = ctx.scratch->Mark();
  const int64_t stride = StrideOf(factor.k_padded);
  const auto ordered = ctx.scratch->Take<tensor::BF16>(count * stride);
  const auto asked = ctx.scratch->Take<float>(ctx.pool->size() * kRows * kWideBlock);
  std::vector<double> losses(count);
  ctx.pool->Run(base::CeilDiv(count, kRows), [&](int64_t task, int worker) {
    const int first = static_cast<int>(task) * kRows, rows = std::min(kRows, count - first);
    tensor::BF16* own = ordered.data() + first * stride;
    for (int r = 0; r < rows; ++r) {
      const float* from = errors + int64_t{first + r} * factor.k;
      for (int p = 0; p < factor.k; ++p) own[r * stride + p] = tensor::ToBF16(from[factor.order[p]]);
      std::fill(own + r * stride + factor.k, own + (r + 1) * stride, tensor::BF16{});
    }
    float* sums = asked.data() + worker * kRows * kWideBlock;
    for (int begin = 0; begin < factor.k_padded; begin += kWideBlock) {
      const int columns = factor.panels.columns(begin);
      factor.panels.Multiply(ctx, begin, own, stride, rows, sums);
      for (int column = begin; column < begin + columns; column += kBlock) {
        factor.panels.AddInside(ctx, column, column + kBlock, own, stride, rows, sums);
      }
      for (int r = 0; r < rows; ++r) {
        for (int c = 0; c < columns; ++c) {
          losses[first + r] += double{sums[r * kWideBlock + c]} * sums[r * kWideBlock + c];
        }
      }
    }
  });
  ctx.scratch->Rewind(mark);
  return losses;
}

}  // namespace

std::vector<float> ScalesByGroup(const QuantizedMatrix& matrix, int padded_rows) {
  const int inputs = matrix.grid.group_inputs(matrix.k), groups = matrix.grid.scale_columns(matrix.k);
  std::vector<float> scales(static_cast<size_t>(groups) * padded_rows, 1.0F);
  for (int r = 0; r < matrix.n; ++r) {
    for (int g = 0; g < groups; ++g) scales[int64_t{g} * padded_rows + r] = matrix.Scale(r, g * inputs);
  }
  return scales;
}

StatusOr<double> LossOfNearest(
    const kernels::ExecContext& ctx, const float* rows, const QuantizedMatrix& matrix,
    const std::function<StatusOr<std::vector<double>>(const float* errors, int count)>& losses_of) {
  const int sample = std::min(kOfNearestRows, matrix.n), k = matrix.k, group = matrix.grid.group_inputs(k);
  std::vector<float> errors(int64_t{2} * sample * k);  // errors of GPTQ, then of the nearest codes
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
    float *mine = errors.data() + int64_t{s} * k, *other = errors.data() + int64_t{sample + s} * k;
    Dequantize(one, 0, 1, other);
    Dequantize(matrix, r, 1, mine);
    for (int c = 0; c < k; ++c) {
      mine[c] = row[c] - mine[c];
      other[c] = row[c] - other[c];
    }
  }
  ASSIGN_OR_RETURN(const std::vector<double> losses, losses_of(errors.data(), 2 * sample));
  const double after = std::accumulate(losses.begin(), losses.begin() + sample, 0.0);
  const double before = std::accumulate(losses.begin() + sample, losses.end(), 0.0);
  return before > 0 ? after / before : 1;
}

StatusOr<QuantizedMatrix> RoundByGptq(const kernels::ExecContext& ctx, const Grid& grid, const float* rows,
                                      int n, int k, const HessianFactor& factor, const ScaleSearch& search,
                                      GptqReport* report) {
  MOESAIC_CHECK_EQ(factor.k, k);
  ASSIGN_OR_RETURN(QuantizedMatrix result, ChooseScales(ctx, grid, rows, n, k, search));
  result.codes.resize(static_cast<size_t>(n) * k);
  const size_t mark = ctx.scratch->Mark();
  {
    Rounder rounder(ctx, rows, factor, &result);
    report->loss = rounder.Run();
  }
  ctx.scratch->Rewind(mark);
  ASSIGN_OR_RETURN(report->of_nearest, LossOfNearest(ctx, rows, result, [&](const float* errors, int count) {
                     return RowLosses(ctx, factor, errors, count);
                   }));
  return result;
}

int64_t GptqBytes(const Grid& grid, int n, int k, int threads) {
  const int k_padded = base::RoundUp(k, kBlock), rows = base::RoundUp(n, kRows);
  const int64_t stride = StrideOf(k_padded);
  const int64_t floats = (threads * int64_t{kTaskRows} + 3 * kOfNearestRows) * stride +
                         int64_t{rows} * (grid.scale_columns(k) + 1);
  return floats * int64_t{sizeof(float)} + threads * int64_t{sizeof(Tile)};
}

double OutputLoss(const kernels::ExecContext& ctx, const HessianFactor& factor, const float* errors,
                  int count) {
  const std::vector<double> losses = RowLosses(ctx, factor, errors, count);
  return std::accumulate(losses.begin(), losses.end(), 0.0);
}

}  // namespace moesaic::quantizer
