#include <algorithm>

#include "base/check.h"
#include "base/round.h"
#include "kernels/elementwise.h"
#include "kernels/kernel_table.h"

namespace moesaic::kernels {
namespace {

constexpr int64_t kTaskFloats = 16 << 10;  // same as for the other elementwise operators

}  // namespace

void Rope(const ExecContext& ctx, const RopeParams& p) {
  MOESAIC_CHECK_EQ(p.dim % 2, 0);
  MOESAIC_CHECK_LE(p.dim, p.head_stride);
  const RopeRowFn rotate = p.interleaved ? ctx.kernels->rope_interleaved : ctx.kernels->rope_half;
  const int half = p.dim / 2;
  const int64_t floats = std::max(int64_t{p.heads} * p.dim, int64_t{1});
  const auto run = static_cast<int>(std::clamp<int64_t>(kTaskFloats / floats, 1, 1 << 20));
  ctx.pool->Run(base::CeilDiv(int64_t{p.rows}, run), [&](int64_t task, int) {
    const auto first = static_cast<int>(task * run);
    for (int row = first; row < std::min(first + run, p.rows); ++row) {
      const int64_t angle = int64_t{p.positions[row]} * half;
      for (int head = 0; head < p.heads; ++head) {
        rotate(p.x + row * p.stride + head * p.head_stride, p.cos + angle, p.sin + angle, p.dim);
      }
    }
  });
}

}  // namespace moesaic::kernels
