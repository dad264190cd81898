#include "carve/least_squares.h"

#include <Eigen/Cholesky>
#include <algorithm>
#include <vector>

#include "base/check.h"
#include "base/round.h"
#include "kernels/linear.h"
#include "runtime/memory.h"
#include "tensor/packed.h"

namespace moesaic::carve {
namespace {

using tensor::PackedFormat;
using tensor::PackedLayout;

// Tokens multiplied at once. The chunk is long enough that sums are seldom loaded and stored, and short
// enough that both transposed operands (1536 x 1024 floats) stay in cache.
constexpr int kSumChunk = 1024;
// Right-hand sides that one task solves.
constexpr int kColumnsPerTask = 32;

// Transposes `from` [count, columns] into `to` [columns, kSumChunk] and scales every token. Tokens past
// `count` are zero.
void Transpose(const kernels::ExecContext& ctx, const Rows& from, int first, int count,
               std::span<const float> weight, std::vector<float>* to) {
  // Transposes a square of one cache line per row in a local buffer and then writes whole lines. Rows of `to`
  // are 4 KiB apart, so all lines of a column share one set of the L1 cache, and lines written value by value
  // would evict each other.
  constexpr int kSquare = 16;
  static_assert(kSumChunk % kSquare == 0);
  ctx.pool->Run(base::CeilDiv(from.columns, kSquare), [&](int64_t task, int) {
    const int begin = static_cast<int>(task) * kSquare, columns = std::min(from.columns - begin, kSquare);
    alignas(64) float square[kSquare][kSquare];
    for (int t = 0; t < kSumChunk; t += kSquare) {
      for (int i = 0; i < kSquare; ++i) {
        const float* row = from.data + (first + std::min(t + i, count - 1)) * from.stride + begin;
        const float scale = t + i >= count ? 0.0F : (weight.empty() ? 1.0F : weight[first + t + i]);
        for (int c = 0; c < columns; ++c) square[c][i] = row[c] * scale;
      }
      for (int c = 0; c < columns; ++c) {
        std::copy_n(square[c], kSquare, to->data() + static_cast<size_t>(begin + c) * kSumChunk + t);
      }
    }
  });
}

}  // namespace

void AddProducts(const kernels::ExecContext& ctx, const Rows& a, const Rows& b, std::span<const float> weight,
                 RowMatrix* sum) {
  const PackedLayout layout = PackedLayout::Of(PackedFormat::kBF16, b.columns, kSumChunk);
  std::vector<float> left(static_cast<size_t>(a.columns) * kSumChunk),
      right(static_cast<size_t>(b.columns) * kSumChunk);
  auto packed = runtime::Buffer::Allocate(static_cast<size_t>(layout.total_bytes), /*huge=*/true);
  MOESAIC_CHECK(packed.ok());
  for (int first = 0; first < a.count; first += kSumChunk) {
    const int count = std::min(kSumChunk, a.count - first);
    Transpose(ctx, a, first, count, weight, &left);
    Transpose(ctx, b, first, count, {}, &right);
    const int panels = (b.columns + tensor::kPanelRows - 1) / tensor::kPanelRows;
    ctx.pool->Run(panels, [&](int64_t panel, int) {
      const int row = static_cast<int>(panel) * tensor::kPanelRows;
      tensor::PackRows(layout, row, std::min(tensor::kPanelRows, b.columns - row),
                       right.data() + static_cast<size_t>(row) * kSumChunk, packed->data());
    });
    const size_t mark = ctx.scratch->Mark();
    const kernels::QuantizedActivations rows =
        kernels::QuantizeActivations(ctx, PackedFormat::kBF16, left.data(), kSumChunk, a.columns, kSumChunk);
    const tensor::PackedMatrix matrix{.layout = layout, .data = packed->data()};
    kernels::Linear(ctx,
                    {.a = &rows, .w = &matrix, .c = sum->data(), .c_stride = b.columns, .accumulate = true});
    ctx.scratch->Rewind(mark);
  }
}

StatusOr<RowMatrix> SolveRidge(runtime::ThreadPool& pool, const RowMatrix& gram, const RowMatrix& right,
                               float ridge) {
  Eigen::MatrixXf matrix = 0.5F * (gram + gram.transpose());
  matrix.diagonal().array() += ridge * matrix.diagonal().mean();
  const Eigen::LLT<Eigen::MatrixXf> factor(matrix);
  if (factor.info() != Eigen::Success || !matrix.allFinite()) {
    return DataLoss(
        "the Gram matrix of the activations is not positive definite; check that the model's "
        "output is finite");
  }
  RowMatrix solution(right.rows(), right.cols());
  const int64_t tasks = base::CeilDiv(right.cols(), kColumnsPerTask);
  pool.Run(tasks, [&](int64_t task, int) {
    const int64_t first = task * kColumnsPerTask;
    const int64_t count = std::min<int64_t>(kColumnsPerTask, right.cols() - first);
    const Eigen::MatrixXf part = factor.solve(Eigen::MatrixXf(right.middleCols(first, count)));
    solution.middleCols(first, count) = part;
  });
  return solution;
}

}  // namespace moesaic::carve
