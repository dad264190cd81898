#include <algorithm>

#include "base/round.h"
#include "kernels/elementwise.h"
#include "kernels/kernel_table.h"

namespace moesaic::kernels {
namespace {

// A round trip through the pool costs a few microseconds, in which one core processes about ten thousand
// floats: less is not worth a task.
constexpr int64_t kTaskFloats = 16 << 10;

// Calls body(first, count) on runs of rows with `floats` floats each; a run has about a task's worth of work.
template <typename Body>
void RunRows(const ExecContext& ctx, int rows, int64_t floats, const Body& body) {
  const auto run =
      static_cast<int>(std::clamp<int64_t>(kTaskFloats / std::max<int64_t>(floats, 1), 1, 1 << 20));
  ctx.pool->Run(base::CeilDiv(rows, run), [&](int64_t task, int) {
    const auto first = static_cast<int>(task * run);
    body(first, std::min(run, rows - first));
  });
}

}  // namespace

void RmsNorm(const ExecContext& ctx, const RmsNormParams& p) {
  RunRows(ctx, p.rows, p.n, [&](int first, int count) {
    for (int row = first; row < first + count; ++row) {
      ctx.kernels->rms_norm(p.x + row * p.x_stride, p.weight, p.n, p.eps, p.y + row * p.y_stride);
    }
  });
}

void SiluMul(const ExecContext& ctx, const SiluMulParams& p) {
  RunRows(ctx, p.rows, p.n, [&](int first, int count) {
    for (int row = first; row < first + count; ++row) {
      ctx.kernels->silu_mul(p.gate + row * p.gate_stride, p.up + row * p.up_stride, p.n,
                            p.y + row * p.y_stride);
    }
  });
}

void Add(const ExecContext& ctx, const float* x, int64_t count, float* y) {
  ctx.pool->Run(base::CeilDiv(count, kTaskFloats), [&](int64_t task, int) {
    const int64_t first = task * kTaskFloats;
    const auto n = static_cast<int>(std::min(kTaskFloats, count - first));
    ctx.kernels->axpy(1.0F, x + first, n, y + first);
  });
}

}  // namespace moesaic::kernels
