#include "quantizer/factor.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/check.h"

namespace moesaic::quantizer {
namespace {

constexpr int kBlock = kFactorBlock;
constexpr int kRowTask =
    192;  // whole blocks of 12 and of 32 rows; enough to use a piece of the right operand
constexpr float kMostDamping = 1;

int PaddedOf(int k) { return (k + kBlock - 1) / kBlock * kBlock; }
int64_t StrideOf(int k) { return PaddedOf(k) + 16; }  // an odd number of cache lines

// A square block on the stack.
struct Square {
  alignas(64) float at[kBlock][kBlock];
};

// Rows above a block before and after they are multiplied by its inverse.
struct RowTile {
  alignas(64) float wanted[kRowTask][kBlock], solved[kRowTask][kBlock];
};

// R R^T = block, R upper triangular, in place (the upper triangle is read). False when it is not positive
// definite.
bool FactorSquare(Square* block) {
  auto& d = block->at;
  for (int j = kBlock - 1; j >= 0; --j) {
    const float pivot = d[j][j];
    if (!(pivot > 0) || !std::isfinite(pivot)) return false;
    const float root = std::sqrt(pivot);
    alignas(64) float column[kBlock];
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

// The inverse of an upper triangular block.
void InvertSquare(const Square& from, Square* to) {
  std::memset(to->at, 0, sizeof to->at);
  for (int i = kBlock - 1; i >= 0; --i) {
    float* row = to->at[i];
    for (int l = i + 1; l < kBlock; ++l) {
      const float scale = from.at[i][l];
      const float* other = to->at[l];
      for (int j = l; j < kBlock; ++j) row[j] -= scale * other[j];
    }
    const float inverse = 1 / from.at[i][i];
    for (int j = i + 1; j < kBlock; ++j) row[j] *= inverse;
    row[i] = inverse;
  }
}

// Writes H, in order and damped, into the upper triangle.
void Fill(const kernels::ExecContext& ctx, const Hessian& hessian, float added, HessianFactor* factor) {
  const int k = factor->k;
  const auto scale = static_cast<float>(1 / hessian.weight());
  ctx.pool->Run(factor->k_padded, [&](int64_t row, int) {
    const auto p = static_cast<int>(row);
    float* to = factor->row(p);
    std::fill(to + p, to + factor->stride, 0.0F);
    if (p >= k) {
      to[p] = 1;
      return;
    }
    const int i = factor->order[p];
    for (int q = p; q < k; ++q) {
      const int j = factor->order[q];
      to[q] = scale * (j < i ? hessian.sums(i)[j] : hessian.sums(j)[i]);
    }
    to[p] += added;
  });
}

// Turns the upper triangle into its factor, the last block of columns first.
bool Factor(const kernels::ExecContext& ctx, HessianFactor* factor) {
  const int size = factor->k_padded;
  const int64_t stride = factor->stride;
  const bool halves = factor->halves;
  const size_t mark = ctx.scratch->Mark();
  PackedPanels right(halves, ctx.scratch->Take<float>(PackedPanels::Floats(size)));
  PackedPanels inverse(halves, ctx.scratch->Take<float>(PackedPanels::Floats(kBlock)));
  Square* diagonal = ctx.scratch->Take<Square>(2).data();
  const auto tiles = ctx.scratch->Take<RowTile>(ctx.pool->size());
  bool positive = true;
  for (int begin = size - kBlock; begin >= 0; begin -= kBlock) {
    const int end = begin + kBlock;
    if (end < size) {
      right.PackTransposed(ctx, factor->row(begin) + end, stride, size - end, /*negative=*/true);
      ctx.pool->Run((end + kRowTask - 1) / kRowTask, [&](int64_t task, int) {
        const int row = static_cast<int>(task) * kRowTask;
        right.Multiply(ctx, factor->row(row) + end, stride, std::min(kRowTask, end - row), true,
                       factor->row(row) + begin, stride);
      });
    }
    for (int i = 0; i < kBlock; ++i) std::copy_n(factor->row(begin + i) + begin, kBlock, diagonal[0].at[i]);
    positive = FactorSquare(&diagonal[0]);
    if (!positive) break;
    for (int i = 0; i < kBlock; ++i) PutBlock(halves, diagonal[0].at[i], factor->row(begin + i) + begin);
    if (begin == 0) break;
    InvertSquare(diagonal[0], &diagonal[1]);
    for (auto& row : diagonal[1].at) PutBlock(halves, row, row);
    inverse.PackTransposed(ctx, diagonal[1].at[0], kBlock, kBlock, /*negative=*/false);
    ctx.pool->Run((begin + kRowTask - 1) / kRowTask, [&](int64_t task, int worker) {
      const int row = static_cast<int>(task) * kRowTask, rows = std::min(kRowTask, begin - row);
      RowTile& tile = tiles[worker];
      for (int i = 0; i < rows; ++i) PutBlock(halves, factor->row(row + i) + begin, tile.wanted[i]);
      inverse.Multiply(ctx, tile.wanted[0], kBlock, rows, false, tile.solved[0], kBlock);
      for (int i = 0; i < rows; ++i) PutBlock(halves, tile.solved[i], factor->row(row + i) + begin);
    });
  }
  ctx.scratch->Rewind(mark);
  return positive;
}

}  // namespace

int64_t FactorBytes(int k) { return PaddedOf(k) * StrideOf(k) * int64_t{sizeof(float)}; }

StatusOr<HessianFactor> FactorHessian(const kernels::ExecContext& ctx, const Hessian& hessian,
                                      const FactorOptions& options) {
  MOESAIC_CHECK(options.damping > 0);
  if (!(hessian.weight() > 0)) {
    return InvalidArgument("no token has reached this layer: it has no Hessian to round by");
  }
  HessianFactor factor;
  factor.k = hessian.k();
  factor.k_padded = PaddedOf(factor.k);
  factor.stride = StrideOf(factor.k);
  factor.halves = MultipliesHalves(ctx);
  factor.order.resize(factor.k);
  factor.diagonal.resize(factor.k);
  double trace = 0;
  for (int i = 0; i < factor.k; ++i) {
    const double square = hessian.sums(i)[i] / hessian.weight();
    if (!std::isfinite(square) || square < 0) {
      return DataLoss("input {} of this layer is not finite in every calibration token", i);
    }
    factor.diagonal[i] = static_cast<float>(square);
    factor.dead += square == 0;
    trace += square;
  }
  if (trace == 0) return InvalidArgument("every input of this layer is 0 in every calibration token");
  std::iota(factor.order.begin(), factor.order.end(), 0);
  if (options.act_order) {
    std::stable_sort(factor.order.begin(), factor.order.end(),
                     [&](int a, int b) { return factor.diagonal[a] > factor.diagonal[b]; });
  }
  ASSIGN_OR_RETURN(factor.memory,
                   runtime::Buffer::Allocate(static_cast<size_t>(FactorBytes(factor.k)), /*huge=*/true));
  const auto mean = static_cast<float>(trace / factor.k);
  for (float damping = options.damping;; damping = std::min(10 * damping, kMostDamping)) {
    ++factor.attempts;
    factor.damping = damping;
    Fill(ctx, hessian, damping * mean, &factor);
    if (Factor(ctx, &factor)) break;
    if (damping >= kMostDamping) {
      return DataLoss(
          "the Hessian of this layer is not positive definite, even damped by its mean diagonal: "
          "are the calibration activations finite?");
    }
  }
  for (float& square : factor.diagonal) square += factor.damping * mean;
  return factor;
}

}  // namespace moesaic::quantizer
