#include <algorithm>

#include "base/check.h"
#include "base/round.h"
#include "kernels/kernel_table.h"
#include "kernels/route.h"

namespace moesaic::kernels {
namespace {

// Routing a row of 256 experts takes a fifth of a microsecond to two; a round trip through the pool takes a
// few.
constexpr int kTaskUnit = 16;
constexpr int kTasksPerThread = 4;  // the last worker to finish is late by at most a quarter of its share

}  // namespace

void Route(const ExecContext& ctx, const RouteParams& p) {
  MOESAIC_CHECK_EQ(p.experts % p.groups, 0);
  const int size = p.experts / p.groups;
  MOESAIC_CHECK_LE(p.top_groups, p.groups);
  MOESAIC_CHECK_LE(p.top_k, p.top_groups * size);
  MOESAIC_CHECK(p.group_score == RouteParams::GroupScore::kMax || p.groups == p.top_groups || size >= 2);
  const size_t mark = ctx.scratch->Mark();
  const int64_t room = RouteScratch(p.experts);
  const auto scratch = ctx.scratch->Take<float>(room * ctx.pool->size());
  const int share = base::CeilDiv(p.rows, ctx.pool->size() * kTasksPerThread);
  const int rows = std::clamp(base::RoundUp(share, kTaskUnit), kTaskUnit, kRouteRows);
  ctx.pool->Run(base::CeilDiv(int64_t{p.rows}, rows), [&](int64_t task, int worker) {
    const int64_t row = task * rows;
    ctx.kernels->route({.logits = p.logits + row * p.experts,
                        .bias = p.bias,
                        .rows = static_cast<int>(std::min<int64_t>(rows, p.rows - row)),
                        .experts = p.experts,
                        .top_k = p.top_k,
                        .groups = p.groups,
                        .top_groups = p.top_groups,
                        .sigmoid = p.scoring == RouteParams::Scoring::kSigmoid,
                        .top_two = p.group_score == RouteParams::GroupScore::kTopTwoSum,
                        .normalize = p.normalize,
                        .scale = p.scale,
                        .scratch = scratch.data() + room * worker,
                        .ids = p.ids + row * p.top_k,
                        .weights = p.weights + row * p.top_k});
  });
  ctx.scratch->Rewind(mark);
}

}  // namespace moesaic::kernels
