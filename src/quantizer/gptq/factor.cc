#include "quantizer/gptq/factor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/check.h"
#include "base/round.h"
#include "quantizer/gptq/panel_product.h"

namespace moesaic::quantizer {
namespace {

constexpr int kCholeskyBlock = kFactorBlock;
constexpr int kRowTask = 256;  // divides kWideBlock
constexpr float kMaxDamping = 1;

static_assert(kCholeskyBlock == kPanelBlock && kWideBlock == kStrip && kCholeskyBlock == kDiagonalRows);

int PaddedOf(int k) { return base::RoundUp(k, kCholeskyBlock); }
int64_t DiagonalBytes(int k_padded) { return int64_t{k_padded} * kCholeskyBlock * int64_t{sizeof(float)}; }

// The matrix to factor: the upper triangle, in blocks of 512 rows with one stride.
class Triangle {
 public:
  Triangle(int size, std::byte* memory) : size_(size), memory_(reinterpret_cast<float*>(memory)) {}
  static int64_t Bytes(int size) {
    const Triangle shape(size, nullptr);
    return (shape.Offset(size - 1) + size) * int64_t{sizeof(float)};
  }
  int size() const { return size_; }
  int64_t stride(int i) const { return size_ - Begin(i) + 16; }  // an odd number of cache lines
  // Columns from Begin(i) on are stored.
  float* row(int i) { return memory_ + Offset(i); }

 private:
  static int Begin(int i) { return i / kWideBlock * kWideBlock; }
  int64_t Offset(int i) const {
    const int64_t begin = Begin(i), block = begin / kWideBlock;
    return begin * (size_ + 16) - kWideBlock * kWideBlock * (block * (block - 1) / 2) +
           (i - begin) * stride(i) - begin;
  }

  int size_;
  float* memory_;
};

// A square block on the stack.
struct Square {
  alignas(64) float at[kCholeskyBlock][kCholeskyBlock];
};

// Rows above a block, before and after the multiplication by its inverse.
struct RowTile {
  alignas(64) float wanted[kRowTask][kCholeskyBlock], solved[kRowTask][kCholeskyBlock];
};

// Factors `block` in place: R R^T = block, R upper triangular; only the upper triangle is read. Returns false
// if it is not positive definite.
bool FactorSquare(Square* block) {
  auto& d = block->at;
  for (int j = kCholeskyBlock - 1; j >= 0; --j) {
    const float pivot = d[j][j];
    if (!(pivot > 0) || !std::isfinite(pivot)) return false;
    const float root = std::sqrt(pivot);
    alignas(64) float column[kCholeskyBlock];
    for (int i = 0; i < j; ++i) column[i] = d[i][j] / root;
    for (int i = 0; i < j; ++i) {
      d[i][j] = column[i];
      const float scale = column[i];
      float* row = d[i];
      for (int l = i; l < j; ++l) row[l] -= scale * column[l];
    }
    d[j][j] = root;
    for (int l = 0; l < j; ++l) d[j][l] = 0;
  }
  return true;
}

// Inverts an upper triangular block.
void InvertSquare(const Square& from, Square* to) {
  std::memset(to->at, 0, sizeof to->at);
  for (int i = kCholeskyBlock - 1; i >= 0; --i) {
    float* row = to->at[i];
    for (int l = i + 1; l < kCholeskyBlock; ++l) {
      const float scale = from.at[i][l];
      const float* other = to->at[l];
      for (int j = l; j < kCholeskyBlock; ++j) row[j] -= scale * other[j];
    }
    const float inverse = 1 / from.at[i][i];
    for (int j = i + 1; j < kCholeskyBlock; ++j) row[j] *= inverse;
    row[i] = inverse;
  }
}

// Writes H, ordered and damped, into the upper triangle. Half of its values are in the row of the input that
// comes first, the others in the row of the later input. The latter are read for many rows at a time, because
// each lies in a cache line of its own.
void Fill(const kernels::ExecContext& ctx, const Hessian& hessian, const std::vector<int>& order, float added,
          Triangle* triangle) {
  constexpr int kColumns = 16, kRows = 2048;
  const int k = hessian.k(), size = triangle->size();
  const auto scale = static_cast<float>(1 / static_cast<double>(hessian.tokens()));
  ctx.pool->Run(base::CeilDiv(size, kColumns), [&](int64_t task, int) {
    const int first = static_cast<int>(task) * kColumns, columns = std::min(kColumns, size - first);
    std::vector<float> values(size_t{kColumns} * kRows);
    for (int begin = 0; begin < first + columns; begin += kRows) {
      const int end = std::min(begin + kRows, first + columns);
      for (int c = 0; c < columns; ++c) {
        float* to = values.data() + c * kRows;
        std::fill_n(to, end - begin, 0.0F);
        if (first + c >= k) continue;
        const int j = order[first + c];
        const float* sums = hessian.sums(j);
        for (int p = begin; p < std::min(end, k); ++p) {
          if (order[p] < j) to[p - begin] = scale * sums[order[p]];
        }
      }
      for (int p = begin; p < end; ++p) {
        float* row = triangle->row(p) + first;
        for (int c = 0; c < columns; ++c) row[c] = values[c * kRows + p - begin];
      }
    }
  });
  ctx.pool->Run(size, [&](int64_t row, int) {
    const auto p = static_cast<int>(row);
    float* to = triangle->row(p);
    if (p >= k) {
      to[p] = 1;
      return;
    }
    const int i = order[p];
    const float* sums = hessian.sums(i);
    for (int q = p + 1; q < k; ++q) {
      if (order[q] < i) to[q] = scale * sums[order[q]];
    }
    to[p] = scale * sums[i] + added;
  });
}

// Sums the products of inputs in their order.
Status Gather(const kernels::ExecContext& ctx, const InputSource& inputs, const std::vector<int>& order,
              Triangle* triangle) {
  ctx.pool->Run(triangle->size(), [&](int64_t row, int) {
    const auto p = static_cast<int>(row);
    std::fill_n(triangle->row(p) + p, triangle->size() - p, 0.0F);
  });
  const ProductSums sums{.k = static_cast<int>(order.size()),
                         .region = ProductSums::Region::kUpper,
                         .row = [triangle](int p) { return triangle->row(p); },
                         .stride = [triangle](int p) { return triangle->stride(p); }};
  return inputs([&](const TokenRows& tokens) { AddProducts(ctx, tokens, order, sums); });
}

// Converts ordered sums of products to the damped H.
void Finish(const kernels::ExecContext& ctx, int64_t tokens, float added, int k, Triangle* triangle) {
  const auto scale = static_cast<float>(1 / static_cast<double>(tokens));
  ctx.pool->Run(triangle->size(), [&](int64_t row, int) {
    const auto p = static_cast<int>(row);
    float* to = triangle->row(p);
    if (p >= k) {
      to[p] = 1;
      return;
    }
    for (int q = p + 1; q < k; ++q) to[q] *= scale;
    to[p] = scale * to[p] + added;
  });
}

// Replaces the upper triangle by its factor, last columns first.
class Factorization {
 public:
  Factorization(const kernels::ExecContext& ctx, Triangle* triangle)
      : ctx_(ctx),
        triangle_(*triangle),
        rows_{MultipliesHalves(ctx), triangle->size()},
        square_rows_{rows_.halves, kCholeskyBlock},
        mark_(ctx.scratch->Mark()),
        strip_(ctx.scratch->Take<float>(PackedPanels::Floats(triangle->size(), kWideBlock))),
        right_(rows_, strip_),
        inverse_(square_rows_,
                 ctx.scratch->Take<float>(PackedPanels::Floats(kCholeskyBlock, kCholeskyBlock))),
        columns_(ctx.scratch->Take<float>(triangle->size() * kColumnStride)),
        diagonal_(ctx.scratch->Take<Square>(2)),
        tiles_(ctx.scratch->Take<RowTile>(ctx.pool->size())) {}
  ~Factorization() { ctx_.scratch->Rewind(mark_); }
  Factorization(const Factorization&) = delete;
  Factorization& operator=(const Factorization&) = delete;

  static int64_t ScratchBytes(int size, int threads) {
    return (PackedPanels::Floats(size, kWideBlock) + PackedPanels::Floats(kCholeskyBlock, kCholeskyBlock) +
            size * kColumnStride) *
               int64_t{sizeof(float)} +
           2 * int64_t{sizeof(Square)} + threads * int64_t{sizeof(RowTile)};
  }

  // Returns false if the matrix is not positive definite.
  StatusOr<bool> Run(const std::function<Status()>& watch) {
    const int size = triangle_.size();
    for (int begin = (size - 1) / kWideBlock * kWideBlock; begin >= 0; begin -= kWideBlock) {
      const int end = std::min(begin + kWideBlock, size);
      begin_ = begin;
      TakeOut(end);
      Update(begin, end, size);
      for (int column = end - kCholeskyBlock; column >= begin; column -= kCholeskyBlock) {
        if (watch) RETURN_IF_ERROR(watch());
        Update(column, column + kCholeskyBlock, end);
        if (!Solve(column)) return false;
      }
    }
    return true;
  }

  // Packs R in place of the triangle. 512 rows at a time are packed elsewhere first. They take half the
  // memory afterwards, so all later rows are preserved.
  void Take(HessianFactor* factor, std::byte* memory) {
    const int size = triangle_.size();
    auto* panels = reinterpret_cast<tensor::BF16*>(memory);
    auto* laid_out = reinterpret_cast<tensor::BF16*>(strip_.data());
    for (int begin = 0; begin < size; begin += kWideBlock) {
      const int squares = std::min(kWideBlock, size - begin) / kCholeskyBlock,
                columns = (size - begin) / kCholeskyBlock;
      ctx_.pool->Run(int64_t{squares} * columns, [&](int64_t task, int worker) {
        const int row = begin + static_cast<int>(task % squares) * kCholeskyBlock;
        const int column = begin + static_cast<int>(task / squares) * kCholeskyBlock;
        if (column < row) return;  // never read
        float(*square)[kCholeskyBlock] = tiles_[worker].wanted;
        for (int i = 0; i < kCholeskyBlock; ++i) rows_.Get(triangle_.row(row + i), column, square[i]);
        factor->panels.Put(row, column, square, laid_out);
        if (column != row) return;
        float* turned = factor->diagonal_blocks.as<float>() + int64_t{row} * kCholeskyBlock;
        for (int i = 0; i < kCholeskyBlock; ++i) {
          for (int c = 0; c < kCholeskyBlock; ++c) turned[c * kCholeskyBlock + i] = square[i][c];
        }
      });
      const int64_t count = factor->panels.RowElements(begin), part = base::CeilDiv(count, 64);
      tensor::BF16* to = panels + factor->panels.RowOffset(begin);
      ctx_.pool->Run(base::CeilDiv(count, part), [&](int64_t task, int) {
        const int64_t first = task * part;
        std::copy_n(laid_out + first, std::min(part, count - first), to + first);
      });
    }
  }

 private:
  static constexpr int64_t kColumnStride = kWideBlock + 16;  // an odd number of cache lines

  // Location of the remaining values of column `column` of a row while its wide block is processed.
  float* left(int row, int column) { return columns_.data() + row * kColumnStride + (column - begin_); }

  // Copies the wide block's columns of rows before `end`.
  void TakeOut(int end) {
    ctx_.pool->Run(end, [&](int64_t row, int) {
      const auto i = static_cast<int>(row);
      std::copy_n(triangle_.row(i) + begin_, end - begin_, left(i, begin_));
    });
  }

  // Subtracts the contributions of columns [end, last) of R from columns [begin, end) of rows before `end`.
  void Update(int begin, int end, int last) {
    if (end == last) return;
    right_.PackTransposed(ctx_, triangle_.row(begin), triangle_.stride(begin), end - begin, end, last,
                          /*negative=*/true);
    ctx_.pool->Run(base::CeilDiv(end, kRowTask), [&](int64_t task, int) {
      const int row = static_cast<int>(task) * kRowTask;
      right_.Multiply(ctx_, triangle_.row(row), triangle_.stride(row), std::min(kRowTask, end - row), true,
                      left(row, begin), kColumnStride);
    });
  }

  // Solves columns [begin, begin + 128) of R.
  bool Solve(int begin) {
    for (int i = 0; i < kCholeskyBlock; ++i)
      std::copy_n(left(begin + i, begin), kCholeskyBlock, diagonal_[0].at[i]);
    if (!FactorSquare(&diagonal_[0])) return false;
    for (int i = 0; i < kCholeskyBlock; ++i) rows_.Put(diagonal_[0].at[i], begin, triangle_.row(begin + i));
    if (begin == 0) return true;
    InvertSquare(diagonal_[0], &diagonal_[1]);
    for (int i = 0; i < kCholeskyBlock; ++i) square_rows_.Put(diagonal_[1].at[i], 0, diagonal_[0].at[i]);
    inverse_.PackTransposed(ctx_, diagonal_[0].at[0], kCholeskyBlock, kCholeskyBlock, 0, kCholeskyBlock,
                            /*negative=*/false);
    ctx_.pool->Run(base::CeilDiv(begin, kRowTask), [&](int64_t task, int worker) {
      const int row = static_cast<int>(task) * kRowTask, rows = std::min(kRowTask, begin - row);
      RowTile& tile = tiles_[worker];
      for (int i = 0; i < rows; ++i) square_rows_.Put(left(row + i, begin), 0, tile.wanted[i]);
      inverse_.Multiply(ctx_, tile.wanted[0], kCholeskyBlock, rows, false, tile.solved[0], kCholeskyBlock);
      for (int i = 0; i < rows; ++i) rows_.Put(tile.solved[i], begin, triangle_.row(row + i));
    });
    return true;
  }

  const kernels::ExecContext& ctx_;
  Triangle& triangle_;
  StripRows rows_, square_rows_;
  size_t mark_;
  std::span<float> strip_;  // memory of right_
  PackedPanels right_, inverse_;
  std::span<float> columns_;
  std::span<Square> diagonal_;
  std::span<RowTile> tiles_;
  int begin_ = 0;  // first column of the wide block
};

}  // namespace

int64_t FactorBytes(int k) {
  const int padded = PaddedOf(k);
  return Triangle::Bytes(padded) + DiagonalBytes(padded);
}

int64_t FactorBytesMade(int k) {
  const int padded = PaddedOf(k);
  return FactorPanels::Bytes(padded) + int64_t{runtime::kHugePage} + DiagonalBytes(padded);
}

int64_t FactoringScratchBytes(int k, int threads) {
  return Factorization::ScratchBytes(PaddedOf(k), threads);
}

StatusOr<float> BeginFactor(int k, int64_t tokens, const FactorOptions& options,
                            const std::function<float(int)>& sum, HessianFactor* result) {
  MOESAIC_CHECK(options.damping > 0);
  if (tokens <= 0) {
    return InvalidArgument("no calibration token has reached this layer, so it has no Hessian");
  }
  HessianFactor& factor = *result;
  factor.k = k;
  factor.k_padded = PaddedOf(k);
  factor.order.resize(k);
  factor.diagonal.resize(k);
  factor.attempts = factor.dead = 0;
  double trace = 0;
  for (int i = 0; i < k; ++i) {
    const double square = sum(i) / static_cast<double>(tokens);
    if (!std::isfinite(square) || square < 0) {
      return DataLoss("input {} of this layer is not finite in every calibration token", i);
    }
    factor.diagonal[i] = static_cast<float>(square);
    factor.dead += square == 0;
    trace += square;
  }
  if (trace == 0) return InvalidArgument("every input of this layer is 0 in every calibration token");
  std::iota(factor.order.begin(), factor.order.end(), 0);
  // The inputs of largest mean square come first (act-order).
  std::stable_sort(factor.order.begin(), factor.order.end(),
                   [&](int a, int b) { return factor.diagonal[a] > factor.diagonal[b]; });
  return static_cast<float>(trace / k);
}

Status FactorDamped(const FactorOptions& options, float mean,
                    const std::function<StatusOr<bool>(float)>& attempt, HessianFactor* factor) {
  for (float damping = options.damping;; damping = std::min(10 * damping, kMaxDamping)) {
    ++factor->attempts;
    factor->damping = damping;
    ASSIGN_OR_RETURN(const bool positive, attempt(damping * mean));
    if (positive) break;
    if (damping >= kMaxDamping) {
      return DataLoss(
          "the Hessian of this layer is not positive definite, even with its mean diagonal added; "
          "check that the calibration activations are finite");
    }
  }
  for (float& square : factor->diagonal) square += factor->damping * mean;
  return OkStatus();
}

template <typename Fill>
Status Factorizer::Make(const kernels::ExecContext& ctx, const FactorOptions& options, float mean,
                        const Fill& fill) {
  HessianFactor& factor = factor_;
  ASSIGN_OR_RETURN(std::byte* const memory,
                   factor.panels.Resize(factor.k_padded, Triangle::Bytes(factor.k_padded)));
  RETURN_IF_ERROR(factor.diagonal_blocks.Reserve(static_cast<size_t>(DiagonalBytes(factor.k_padded)),
                                                 /*huge=*/true));
  Triangle triangle(factor.k_padded, memory);
  const auto attempt = [&](float added) -> StatusOr<bool> {
    RETURN_IF_ERROR(fill(added, &triangle));
    Factorization factorization(ctx, &triangle);
    ASSIGN_OR_RETURN(const bool positive, factorization.Run(options.watch));
    if (positive) factorization.Take(&factor, memory);
    return positive;
  };
  return FactorDamped(options, mean, attempt, &factor);
}

StatusOr<const HessianFactor*> Factorizer::Factor(const kernels::ExecContext& ctx, const Hessian& hessian,
                                                  const FactorOptions& options) {
  ASSIGN_OR_RETURN(const float mean, BeginFactor(
                                         hessian.k(), hessian.tokens(), options,
                                         [&](int i) { return hessian.sums(i)[i]; }, &factor_));
  RETURN_IF_ERROR(Make(ctx, options, mean, [&](float added, Triangle* triangle) {
    Fill(ctx, hessian, factor_.order, added, triangle);
    return OkStatus();
  }));
  return &factor_;
}

int64_t Factorizer::FromInputsBytes(int k) { return DiagonalBytes(PaddedOf(k)); }

StatusOr<Factorizer::FromInputs> Factorizer::Factor(const kernels::ExecContext& ctx, int k,
                                                    const InputSource& inputs, const FactorOptions& options) {
  FromInputs result;
  std::vector<float> squares(k);
  {
    std::vector<float> blocks(static_cast<size_t>(PaddedOf(k)) * kCholeskyBlock);
    const auto row = [&](int i) {
      return blocks.data() + int64_t{i} * kCholeskyBlock - i / kCholeskyBlock * kCholeskyBlock;
    };
    const ProductSums sums{.k = k, .region = ProductSums::Region::kDiagonal, .row = row, .stride = [](int) {
                             return int64_t{kCholeskyBlock};
                           }};
    RETURN_IF_ERROR(inputs([&](const TokenRows& tokens) {
      AddProducts(ctx, tokens, {}, sums);
      result.tokens += tokens.count;
    }));
    for (int i = 0; i < k; ++i) squares[i] = row(i)[i];
  }
  if (std::ranges::all_of(squares, [](float square) { return square == 0; })) return result;
  ASSIGN_OR_RETURN(const float mean,
                   BeginFactor(
                       k, result.tokens, options, [&](int i) { return squares[i]; }, &factor_));
  RETURN_IF_ERROR(Make(ctx, options, mean, [&](float added, Triangle* triangle) {
    RETURN_IF_ERROR(Gather(ctx, inputs, factor_.order, triangle));
    Finish(ctx, result.tokens, added, k, triangle);
    return OkStatus();
  }));
  factor_.panels.Trim();
  result.factor = &factor_;
  return result;
}

StatusOr<HessianFactor> FactorHessian(const kernels::ExecContext& ctx, const Hessian& hessian,
                                      const FactorOptions& options) {
  Factorizer factorizer;
  RETURN_IF_ERROR(factorizer.Factor(ctx, hessian, options).status());
  return factorizer.Take();
}

}  // namespace moesaic::quantizer
