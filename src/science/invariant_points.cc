#include "science/invariant_points.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "base/round.h"
#include "science/run_tasks.h"

namespace moesaic::science {
namespace {

constexpr int64_t kResidueTile = 24;  // queries per task: scores of 12 heads and 512 keys take 590 KiB

using Vec3 = std::array<float, 3>;

Vec3 ToGlobal(const Frames& frames, int64_t i, const Vec3& local) {
  const float* r = frames.rotation + 9 * i;
  const float* t = frames.translation + 3 * i;
  Vec3 out;
  for (int row = 0; row < 3; ++row)
    out[row] = r[3 * row] * local[0] + r[3 * row + 1] * local[1] + r[3 * row + 2] * local[2] + t[row];
  return out;
}

Vec3 ToLocal(const Frames& frames, int64_t i, const Vec3& global) {
  const float* r = frames.rotation + 9 * i;
  const float* t = frames.translation + 3 * i;
  const Vec3 d = {global[0] - t[0], global[1] - t[1], global[2] - t[2]};
  Vec3 out;
  for (int column = 0; column < 3; ++column)
    out[column] = r[column] * d[0] + r[3 + column] * d[1] + r[6 + column] * d[2];
  return out;
}

// OpenFold's projections have x, y and z of all points one after another.
Vec3 PointOf(const float* row, int points, int point) {
  return {row[point], row[points + point], row[2 * points + point]};
}

// Operands of one head: queries [n, width], keys transposed [width, n], values [n, v_width].
struct IpaOperands {
  int width, v_width;
  float *q, *k, *v;  // [heads][...]
};

}  // namespace

StatusOr<InvariantPointAttention> InvariantPointAttention::Load(const WeightScope& weights,
                                                                const InvariantPointOptions& o) {
  for (const int size : {o.heads, o.dim, o.query_points, o.value_points}) {
    if (size < 1) return InvalidArgument("heads, dim and points must be 1 or more, not {}", size);
  }
  InvariantPointAttention layer;
  layer.options_ = o;
  ASSIGN_OR_RETURN(layer.q_, weights.Linear("linear_q", o.heads * o.dim));
  const int c_s = layer.q_.k();
  ASSIGN_OR_RETURN(layer.kv_, weights.Linear("linear_kv", 2 * o.heads * o.dim, c_s));
  ASSIGN_OR_RETURN(layer.q_points_, weights.Linear("linear_q_points", 3 * o.heads * o.query_points, c_s));
  ASSIGN_OR_RETURN(layer.kv_points_,
                   weights.Linear("linear_kv_points", 3 * o.heads * (o.query_points + o.value_points), c_s));
  ASSIGN_OR_RETURN(layer.bias_, weights.Linear("linear_b", o.heads));
  ASSIGN_OR_RETURN(layer.out_, weights.Linear("linear_out", c_s,
                                              o.heads * (o.dim + 4 * o.value_points + layer.bias_.k())));
  ASSIGN_OR_RETURN(layer.point_weights_, weights.Vector("head_weights", o.heads));
  for (float& w : layer.point_weights_)
    w = std::log1p(std::exp(w)) * std::sqrt(1.0F / (3 * (static_cast<float>(o.query_points) * 9 / 2)));
  return layer;
}

Status InvariantPointAttention::Run(const graph::Context& ctx, int64_t n, const float* s, const float* z,
                                    const Frames& frames, const float* mask, float* out) const {
  const InvariantPointOptions& o = options_;
  if (n == 0) return OkStatus();
  const graph::ScratchScope scope(ctx);
  auto take = [&](int64_t count) { return ctx.exec.scratch->Take<float>(count).data(); };
  const int c_s = q_.k(), c_z = bias_.k(), kv_points = o.query_points + o.value_points;
  float* q = take(n * q_.n());
  float* kv = take(n * kv_.n());
  float* q_points = take(n * q_points_.n());
  float* kv_points_rows = take(n * kv_points_.n());
  Apply(ctx, q_, s, c_s, n, q, q_.n());
  Apply(ctx, kv_, s, c_s, n, kv, kv_.n());
  Apply(ctx, q_points_, s, c_s, n, q_points, q_points_.n());
  Apply(ctx, kv_points_, s, c_s, n, kv_points_rows, kv_points_.n());
  // Distances do not change with the origin: the mean position keeps |k|^2 - 2 q k free of cancellation.
  std::vector<float> centered(frames.translation, frames.translation + 3 * n);
  for (int axis = 0; axis < 3; ++axis) {
    double mean = 0;
    for (int64_t i = 0; i < n; ++i) mean += centered[3 * i + axis];
    for (int64_t i = 0; i < n; ++i)
      centered[3 * i + axis] -= static_cast<float>(mean / static_cast<double>(n));
  }
  const Frames local = {frames.rotation, centered.data()};
  // -w/2 |q - k|^2 = w q k - w/2 |k|^2 - w/2 |q|^2, whose last term is the same for all keys: softmax removes
  // it.
  const IpaOperands ops = {.width = o.dim + 3 * o.query_points + 1,
                           .v_width = o.dim + 3 * o.value_points,
                           .q = take(o.heads * n * (o.dim + 3 * o.query_points + 1)),
                           .k = take(o.heads * n * (o.dim + 3 * o.query_points + 1)),
                           .v = take(o.heads * n * (o.dim + 3 * o.value_points))};
  const float scale = std::sqrt(1.0F / (3 * static_cast<float>(o.dim)));
  ForRows(ctx, n, 16, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      for (int h = 0; h < o.heads; ++h) {
        float* q_row = ops.q + (h * n + i) * ops.width;
        float* k_column = ops.k + int64_t{h} * ops.width * n + i;
        float* v_row = ops.v + (h * n + i) * ops.v_width;
        int at = 0;
        auto add = [&](float query, float key) {
          q_row[at] = query;
          k_column[at++ * n] = key;
        };
        for (int d = 0; d < o.dim; ++d) {
          add(scale * q[i * q_.n() + h * o.dim + d], kv[i * kv_.n() + 2 * h * o.dim + d]);
          v_row[d] = kv[i * kv_.n() + (2 * h + 1) * o.dim + d];
        }
        float squares = 0;
        for (int p = 0; p < o.query_points; ++p) {
          const Vec3 query = ToGlobal(
              local, i,
              PointOf(q_points + i * q_points_.n(), o.heads * o.query_points, h * o.query_points + p));
          const Vec3 key = ToGlobal(
              local, i, PointOf(kv_points_rows + i * kv_points_.n(), o.heads * kv_points, h * kv_points + p));
          for (int axis = 0; axis < 3; ++axis) {
            add(point_weights_[h] * query[axis], key[axis]);
            squares += key[axis] * key[axis];
          }
        }
        add(1, -0.5F * point_weights_[h] * squares);
        for (int p = 0; p < o.value_points; ++p) {
          const Vec3 value = ToGlobal(local, i,
                                      PointOf(kv_points_rows + i * kv_points_.n(), o.heads * kv_points,
                                              h * kv_points + o.query_points + p));
          std::copy_n(value.data(), 3, v_row + o.dim + 3 * p);
        }
      }
    }
  });
  struct IpaTile {
    TileDense dense;
    float *scores, *values, *pair_bias;
  };
  std::vector<IpaTile> tiles;
  for (int w = 0; w < ctx.exec.pool->size(); ++w) {
    tiles.push_back({TileDense(ctx, tensor::PackedFormat::kF32, static_cast<int>(n), c_z),
                     take(kResidueTile * o.heads * n), take(kResidueTile * ops.v_width), take(n * o.heads)});
  }
  const int width = out_.k();
  float* features = take(n * width);
  const float bias_scale = std::sqrt(1.0F / 3);
  ctx.exec.pool->Run(base::CeilDiv(n, kResidueTile), [&](int64_t task, int worker) {
    const IpaTile& tile = tiles[worker];
    const graph::RowKernels& rows = ctx.graph->rows;
    const int64_t first = task * kResidueTile, count = std::min(kResidueTile, n - first);
    // Scores are [count, heads, n], so that the pair output of a residue is one product [heads, n] [n, c_z].
    for (int h = 0; h < o.heads; ++h) {
      rows.matmul({.a = ops.q + (h * n + first) * ops.width,
                   .b = ops.k + int64_t{h} * ops.width * n,
                   .c = tile.scores + h * n,
                   .a_stride = ops.width,
                   .b_stride = n,
                   .c_stride = o.heads * n,
                   .m = count,
                   .n = n,
                   .k = ops.width});
    }
    for (int64_t i = 0; i < count; ++i) {
      const float* z_row = z + (first + i) * n * c_z;
      float* scores = tile.scores + i * o.heads * n;
      tile.dense.Run(bias_, z_row, c_z, static_cast<int>(n), tile.pair_bias, o.heads);
      for (int h = 0; h < o.heads; ++h) {
        for (int64_t j = 0; j < n; ++j) {
          scores[h * n + j] += bias_scale * tile.pair_bias[j * o.heads + h];
          if (mask != nullptr && mask[j] == 0) scores[h * n + j] = -std::numeric_limits<float>::infinity();
        }
        rows.softmax(scores + h * n, static_cast<int>(n));
      }
      rows.matmul({.a = scores,
                   .b = z_row,
                   .c = features + (first + i) * width + o.heads * (o.dim + 4 * o.value_points),
                   .a_stride = n,
                   .b_stride = c_z,
                   .c_stride = c_z,
                   .m = o.heads,
                   .n = c_z,
                   .k = n});
    }
    for (int h = 0; h < o.heads; ++h) {
      rows.matmul({.a = tile.scores + h * n,
                   .b = ops.v + int64_t{h} * n * ops.v_width,
                   .c = tile.values,
                   .a_stride = o.heads * n,
                   .b_stride = ops.v_width,
                   .c_stride = ops.v_width,
                   .m = count,
                   .n = ops.v_width,
                   .k = n});
      const int points = o.heads * o.value_points;
      for (int64_t i = 0; i < count; ++i) {
        float* row = features + (first + i) * width;
        const float* value = tile.values + i * ops.v_width;
        std::copy_n(value, o.dim, row + h * o.dim);
        for (int p = 0; p < o.value_points; ++p) {
          const float* at = value + o.dim + 3 * p;
          const Vec3 point = ToLocal(local, first + i, {at[0], at[1], at[2]});
          float* to = row + o.heads * o.dim + h * o.value_points + p;
          float squares = 1e-8F;
          for (int axis = 0; axis < 3; ++axis) {
            to[axis * points] = point[axis];
            squares += point[axis] * point[axis];
          }
          to[3 * points] = std::sqrt(squares);
        }
      }
    }
  });
  Apply(ctx, out_, features, width, n, out, c_s);
  return OkStatus();
}

}  // namespace moesaic::science
