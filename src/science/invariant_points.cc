#include "science/invariant_points.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/round.h"
#include "science/invariant_points_state.h"
#include "science/run_tasks.h"

namespace moesaic::science {
namespace {

constexpr int64_t kResidueTile = 24;  // queries per task: scores of 12 heads and 512 keys take 590 KiB

Vec3 ToGlobal(const float* rotation, const float* translation, const Vec3& local) {
  Vec3 out = Turned(rotation, local);
  for (int axis = 0; axis < 3; ++axis) out[axis] += translation[axis];
  return out;
}

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
  // The product with a row of z has z as its left operand, which need not be transposed for it.
  ASSIGN_OR_RETURN(const WeightTensor* bias, weights.Get("linear_b.weight"));
  const int c_z = layer.bias_.k();
  const float scale = std::sqrt(1.0F / 3);
  layer.bias_rows_.assign(int64_t{c_z} * o.heads, 0);
  layer.bias_shift_.assign(o.heads, 0);
  for (int h = 0; h < o.heads; ++h) {
    for (int c = 0; c < c_z; ++c) layer.bias_rows_[c * o.heads + h] = scale * bias->values[h * c_z + c];
    if (layer.bias_.bias() != nullptr) layer.bias_shift_[h] = scale * layer.bias_.bias()[h];
  }
  return layer;
}

void InvariantPointAttention::AddBias(const graph::Context& ctx, int64_t n, const float* z, float* buffer,
                                      float* scores) const {
  const graph::RowKernels& rows = ctx.graph->rows;
  const int heads = options_.heads;
  rows.matmul({.a = z,
               .b = bias_rows_.data(),
               .c = buffer,
               .a_stride = bias_.k(),
               .b_stride = heads,
               .c_stride = heads,
               .m = n,
               .n = heads,
               .k = bias_.k(),
               .prefetch_a = true});
  float* transposed = buffer + n * heads;
  rows.transpose(buffer, heads, n, heads, transposed, n);
  for (int h = 0; h < heads; ++h) {
    float* to = scores + h * n;
    ctx.exec.kernels->axpy(1, transposed + h * n, static_cast<int>(n), to);
    for (int64_t j = 0; j < n && bias_shift_[h] != 0; ++j) to[j] += bias_shift_[h];
  }
}

void InvariantPointAttention::PairBias(const graph::Context& ctx, int64_t n, const float* z,
                                       float* bias) const {
  const graph::ScratchScope scope(ctx);
  const int64_t row = options_.heads * n;
  std::vector<float*> buffers;
  for (int w = 0; w < ctx.exec.pool->size(); ++w)
    buffers.push_back(ctx.exec.scratch->Take<float>(2 * n * options_.heads).data());
  ctx.exec.pool->Run(n, [&](int64_t i, int worker) {
    std::fill_n(bias + i * row, row, 0.0F);
    AddBias(ctx, n, z + i * n * bias_.k(), buffers[worker], bias + i * row);
  });
}

void InvariantPointAttention::Project(const graph::Context& ctx, int64_t n, const float* s,
                                      const Frames& frames, State* state) const {
  const InvariantPointOptions& o = options_;
  auto take = [&](int64_t count) { return ctx.exec.scratch->Take<float>(count).data(); };
  const int kv_points = o.query_points + o.value_points;
  auto project = [&](const Dense& dense) {
    float* to = take(n * dense.n());
    Apply(ctx, dense, s, dense.k(), n, to, dense.n());
    return to;
  };
  state->q = project(q_);
  state->kv = project(kv_);
  state->q_points = project(q_points_);
  state->kv_points = project(kv_points_);
  // Distances do not change with the origin: the mean position keeps |k|^2 - 2 q k free of cancellation.
  std::vector<float>& centered = state->centered;
  centered.assign(frames.translation, frames.translation + 3 * n);
  for (int axis = 0; axis < 3; ++axis) {
    double mean = 0;
    for (int64_t i = 0; i < n; ++i) mean += centered[3 * i + axis];
    for (int64_t i = 0; i < n; ++i)
      centered[3 * i + axis] -= static_cast<float>(mean / static_cast<double>(n));
  }
  state->rotation = frames.rotation;
  // -w/2 |q - k|^2 = w q k - w/2 |k|^2 - w/2 |q|^2, whose last term is the same for all keys: softmax removes
  // it.
  state->width = o.dim + 3 * o.query_points + 1;
  state->v_width = o.dim + 3 * o.value_points;
  state->queries = take(o.heads * n * state->width);
  state->keys = take(o.heads * n * state->width);
  state->values = take(o.heads * n * state->v_width);
  const float scale = std::sqrt(1.0F / (3 * static_cast<float>(o.dim)));
  ForRows(ctx, n, 16, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const float *r = frames.rotation + 9 * i, *t = centered.data() + 3 * i;
      const float *q = state->q + i * q_.n(), *kv = state->kv + i * kv_.n(),
                  *q_points = state->q_points + i * q_points_.n(),
                  *kv_row = state->kv_points + i * kv_points_.n();
      for (int h = 0; h < o.heads; ++h) {
        float* q_row = state->queries + (h * n + i) * state->width;
        float* k_column = state->keys + int64_t{h} * state->width * n + i;
        float* v_row = state->values + (h * n + i) * state->v_width;
        int at = 0;
        auto add = [&](float query, float key) {
          q_row[at] = query;
          k_column[at++ * n] = key;
        };
        for (int d = 0; d < o.dim; ++d) {
          add(scale * q[h * o.dim + d], kv[2 * h * o.dim + d]);
          v_row[d] = kv[(2 * h + 1) * o.dim + d];
        }
        float squares = 0;
        for (int p = 0; p < o.query_points; ++p) {
          const Vec3 query =
              ToGlobal(r, t, PointOf(q_points, o.heads * o.query_points, h * o.query_points + p));
          const Vec3 key = ToGlobal(r, t, PointOf(kv_row, o.heads * kv_points, h * kv_points + p));
          for (int axis = 0; axis < 3; ++axis) {
            add(point_weights_[h] * query[axis], key[axis]);
            squares += key[axis] * key[axis];
          }
        }
        add(1, -0.5F * point_weights_[h] * squares);
        for (int p = 0; p < o.value_points; ++p) {
          const Vec3 value =
              ToGlobal(r, t, PointOf(kv_row, o.heads * kv_points, h * kv_points + o.query_points + p));
          std::copy_n(value.data(), 3, v_row + o.dim + 3 * p);
        }
      }
    }
  });
}

void InvariantPointAttention::Attend(const graph::Context& ctx, int64_t n, const float* z, const float* mask,
                                     const float* pair_bias, const State& state) const {
  const graph::ScratchScope scope(ctx);
  const InvariantPointOptions& o = options_;
  const int c_z = bias_.k(), width = out_.k();
  auto take = [&](int64_t count) { return ctx.exec.scratch->Take<float>(count).data(); };
  struct IpaTile {
    float *scores, *values, *bias;
  };
  std::vector<IpaTile> tiles;
  for (int w = 0; w < ctx.exec.pool->size(); ++w) {
    tiles.push_back({take(state.weights != nullptr ? 0 : kResidueTile * o.heads * n),
                     take(kResidueTile * state.v_width), take(pair_bias != nullptr ? 0 : 2 * n * o.heads)});
  }
  ctx.exec.pool->Run(base::CeilDiv(n, kResidueTile), [&](int64_t task, int worker) {
    const IpaTile& tile = tiles[worker];
    const graph::RowKernels& rows = ctx.graph->rows;
    const int64_t first = task * kResidueTile, count = std::min(kResidueTile, n - first);
    float* all_scores = state.weights != nullptr ? state.weights + first * o.heads * n : tile.scores;
    // Scores are [count, heads, n], so that the pair output of a residue is one product [heads, n] [n, c_z].
    for (int h = 0; h < o.heads; ++h) {
      rows.matmul({.a = state.queries + (h * n + first) * state.width,
                   .b = state.keys + int64_t{h} * state.width * n,
                   .c = all_scores + h * n,
                   .a_stride = state.width,
                   .b_stride = n,
                   .c_stride = o.heads * n,
                   .m = count,
                   .n = n,
                   .k = state.width});
    }
    for (int64_t i = 0; i < count; ++i) {
      const float* z_row = z + (first + i) * n * c_z;
      float* scores = all_scores + i * o.heads * n;
      if (pair_bias != nullptr) {
        ctx.exec.kernels->axpy(1, pair_bias + (first + i) * o.heads * n, static_cast<int>(o.heads * n),
                               scores);
      } else {
        AddBias(ctx, n, z_row, tile.bias, scores);
      }
      for (int h = 0; h < o.heads; ++h) {
        for (int64_t j = 0; j < n && mask != nullptr; ++j) {
          if (mask[j] == 0) scores[h * n + j] = -std::numeric_limits<float>::infinity();
        }
        rows.softmax(scores + h * n, static_cast<int>(n));
      }
      rows.matmul({.a = scores,
                   .b = z_row,
                   .c = state.features + (first + i) * width + o.heads * (o.dim + 4 * o.value_points),
                   .a_stride = n,
                   .b_stride = c_z,
                   .c_stride = c_z,
                   .m = o.heads,
                   .n = c_z,
                   .k = n});
    }
    for (int h = 0; h < o.heads; ++h) {
      rows.matmul({.a = all_scores + h * n,
                   .b = state.values + int64_t{h} * n * state.v_width,
                   .c = tile.values,
                   .a_stride = o.heads * n,
                   .b_stride = state.v_width,
                   .c_stride = state.v_width,
                   .m = count,
                   .n = state.v_width,
                   .k = n});
      const int points = o.heads * o.value_points;
      for (int64_t i = 0; i < count; ++i) {
        float* row = state.features + (first + i) * width;
        const float* value = tile.values + i * state.v_width;
        const float *r = state.rotation + 9 * (first + i), *t = state.centered.data() + 3 * (first + i);
        std::copy_n(value, o.dim, row + h * o.dim);
        for (int p = 0; p < o.value_points; ++p) {
          const float* at = value + o.dim + 3 * p;
          const Vec3 point = TurnedBack(r, {at[0] - t[0], at[1] - t[1], at[2] - t[2]});
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
}

Status InvariantPointAttention::Run(const graph::Context& ctx, int64_t n, const float* s, const float* z,
                                    const Frames& frames, const float* mask, float* out,
                                    const float* pair_bias) const {
  if (n == 0) return OkStatus();
  const graph::ScratchScope scope(ctx);
  State state;
  Project(ctx, n, s, frames, &state);
  state.features = ctx.exec.scratch->Take<float>(n * out_.k()).data();
  Attend(ctx, n, z, mask, pair_bias, state);
  Apply(ctx, out_, state.features, out_.k(), n, out, c_s());
  return OkStatus();
}

}  // namespace moesaic::science
