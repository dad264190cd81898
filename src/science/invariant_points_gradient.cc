// The backward pass of invariant point attention.
#include <algorithm>
#include <cmath>

#include "base/round.h"
#include "science/invariant_points_state.h"
#include "science/run_tasks.h"

namespace moesaic::science {
namespace {

constexpr int64_t kQueries = 24;  // per task; partial sums of parameters' gradients belong to these

void AddOuter(const Vec3& a, const Vec3& b, float* r) {
  for (int row = 0; row < 3; ++row) {
    for (int column = 0; column < 3; ++column) r[3 * row + column] += a[row] * b[column];
  }
}

void AddPoint(const Vec3& x, float* to) {
  for (int axis = 0; axis < 3; ++axis) to[axis] += x[axis];
}

// Writes a point to a row in OpenFold's layout.
void StorePoint(const Vec3& x, int points, int point, float* row) {
  for (int axis = 0; axis < 3; ++axis) row[axis * points + point] = x[axis];
}

}  // namespace

struct InvariantPointAttention::BackwardRun {
  const InvariantPointAttention& layer;
  const graph::Context& ctx;
  int64_t n;
  const State& state;
  const float* z;
  float* z_grad;  // or null
  // [n, inputs of linear_out]; [heads, n, v_width]; [n, heads, n]
  float *features_grad = nullptr, *value_grad = nullptr, *score_grad = nullptr;
  // [heads, n, width] and [heads, n, v_width]
  float *query_in = nullptr, *key_in = nullptr, *value_in = nullptr;
  float *q_grad = nullptr, *kv_grad = nullptr, *q_points_grad = nullptr, *kv_points_grad = nullptr;
  float *rotation_grad = nullptr, *translation_grad = nullptr,
        *head_grad = nullptr;  // [n, 9], [n, 3], [n, heads]

  const InvariantPointOptions& o() const { return layer.options_; }
  int c_z() const { return layer.bias_.k(); }
  int64_t plane() const { return o().heads * n; }
  float* Take(int64_t count) const { return ctx.exec.scratch->Take<float>(count).data(); }

  void TakeBuffers() {
    const int64_t heads = o().heads;
    features_grad = Take(n * layer.out_.k());
    value_grad = Take(heads * n * state.v_width);
    score_grad = Take(heads * n * n);
    query_in = Take(heads * n * state.width);
    key_in = Take(heads * n * state.width);
    value_in = Take(heads * n * state.v_width);
    q_grad = Take(n * layer.q_.n());
    kv_grad = Take(n * layer.kv_.n());
    q_points_grad = Take(n * layer.q_points_.n());
    kv_points_grad = Take(n * layer.kv_points_.n());
    rotation_grad = Take(9 * n);
    translation_grad = Take(3 * n);
    head_grad = Take(heads * n);
    std::fill_n(rotation_grad, 9 * n, 0.0F);
    std::fill_n(translation_grad, 3 * n, 0.0F);
  }

  // From the features of every residue to the weighted sums of values.
  void ValueGradients() const {
    const int heads = o().heads, dim = o().dim, count = o().value_points, points = heads * count;
    ForRows(ctx, n, 16, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const float *row = state.features + i * layer.out_.k(), *grad = features_grad + i * layer.out_.k();
        const float* r = state.rotation + 9 * i;
        for (int h = 0; h < heads; ++h) {
          float* to = value_grad + (h * n + i) * state.v_width;
          std::copy_n(grad + h * dim, dim, to);
          for (int p = 0; p < count; ++p) {
            const int at = heads * dim + h * count + p;
            const float norm = row[at + 3 * points], norm_grad = grad[at + 3 * points];
            const Vec3 local = PointOf(row + at, points, 0);
            Vec3 local_grad = PointOf(grad + at, points, 0);
            for (int axis = 0; axis < 3; ++axis) local_grad[axis] += norm_grad * local[axis] / norm;
            const Vec3 global_grad = Turned(r, local_grad);
            std::copy_n(global_grad.data(), 3, to + dim + 3 * p);
            AddOuter(Turned(r, local), local_grad, rotation_grad + 9 * i);
            AddPoint({-global_grad[0], -global_grad[1], -global_grad[2]}, translation_grad + 3 * i);
          }
        }
      }
    });
  }

  struct Buffers {
    float *columns, *partial;  // [n, heads]; [heads, c_z + 1]
  };

  // The gradient of the scores of one query, from that of its weights; adds to z's gradient and the bias'.
  void QueryGradients(int64_t i, const float* bias_weights, const Buffers& buffers) const {
    const graph::RowKernels& rows = ctx.graph->rows;
    const int heads = o().heads;
    const float *z_row = z + i * n * c_z(), *weights = state.weights + i * plane(),
                *pair_grad = features_grad + i * layer.out_.k() + heads * (o().dim + 4 * o().value_points);
    float* scores = score_grad + i * plane();
    rows.matmul({.a = pair_grad,
                 .b = z_row,
                 .c = scores,
                 .a_stride = c_z(),
                 .b_stride = c_z(),
                 .c_stride = n,
                 .m = heads,
                 .n = n,
                 .k = c_z(),
                 .accumulate = true,
                 .b_transposed = true});
    for (int h = 0; h < heads; ++h) {
      const float* w = weights + h * n;
      float *g = scores + h * n, dot = 0, sum = 0;
      for (int64_t j = 0; j < n; ++j) dot += w[j] * g[j];
      for (int64_t j = 0; j < n; ++j) {
        g[j] = w[j] * (g[j] - dot);
        sum += g[j];
      }
      buffers.partial[heads * c_z() + h] += sum;
    }
    rows.matmul({.a = scores,
                 .b = z_row,
                 .c = buffers.partial,
                 .a_stride = n,
                 .b_stride = c_z(),
                 .c_stride = c_z(),
                 .m = heads,
                 .n = c_z(),
                 .k = n,
                 .accumulate = true});
    for (const bool bias : {false, true}) {
      if (z_grad == nullptr) break;
      rows.transpose(bias ? scores : weights, n, heads, n, buffers.columns, heads);
      rows.matmul({.a = buffers.columns,
                   .b = bias ? bias_weights : pair_grad,
                   .c = z_grad + i * n * c_z(),
                   .a_stride = heads,
                   .b_stride = c_z(),
                   .c_stride = c_z(),
                   .m = n,
                   .n = c_z(),
                   .k = heads,
                   .accumulate = true});
    }
  }

  void ScoreGradients(const DenseGradients& bias_grads) const {
    const graph::ScratchScope scope(ctx);
    const int64_t heads = o().heads, tasks = base::CeilDiv(n, kQueries), partial_size = heads * (c_z() + 1);
    const float scale = std::sqrt(1.0F / 3);
    std::vector<float> bias_weights(heads * c_z());  // [heads, c_z]: linear_b times its scale
    for (int h = 0; h < heads; ++h) {
      for (int c = 0; c < c_z(); ++c) bias_weights[h * c_z() + c] = layer.bias_rows_[c * heads + h];
    }
    float* partials = Take(tasks * partial_size);
    std::fill_n(partials, tasks * partial_size, 0.0F);
    std::vector<float*> transposed;
    for (int w = 0; w < ctx.exec.pool->size(); ++w) transposed.push_back(Take(n * heads));
    ctx.exec.pool->Run(tasks, [&](int64_t task, int worker) {
      const int64_t first = task * kQueries, count = std::min(kQueries, n - first);
      for (int64_t h = 0; h < heads; ++h) {
        ctx.graph->rows.matmul({.a = value_grad + (h * n + first) * state.v_width,
                                .b = state.values + h * n * state.v_width,
                                .c = score_grad + first * plane() + h * n,
                                .a_stride = state.v_width,
                                .b_stride = state.v_width,
                                .c_stride = plane(),
                                .m = count,
                                .n = n,
                                .k = state.v_width,
                                .b_transposed = true});
      }
      for (int64_t i = first; i < first + count; ++i)
        QueryGradients(i, bias_weights.data(), {transposed[worker], partials + task * partial_size});
    });
    for (int64_t task = 0; task < tasks; ++task) {
      const float* partial = partials + task * partial_size;
      for (int64_t k = 0; k < heads * c_z() && bias_grads.weight != nullptr; ++k)
        bias_grads.weight[k] += scale * partial[k];
      for (int64_t h = 0; h < heads && bias_grads.bias != nullptr; ++h)
        bias_grads.bias[h] += scale * partial[heads * c_z() + h];
    }
  }

  // Gradients of queries, keys and values: products over all pairs of a head.
  void OperandGradients() const {
    const graph::ScratchScope scope(ctx);
    std::vector<float*> transposed;
    for (int w = 0; w < ctx.exec.pool->size(); ++w) transposed.push_back(Take(n * n));
    ctx.exec.pool->Run(o().heads, [&](int64_t h, int worker) {
      const graph::RowKernels& rows = ctx.graph->rows;
      const float* scores = score_grad + h * n;
      const int64_t width = state.width, v_width = state.v_width;
      float* square = transposed[worker];
      auto multiply = [&](const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t columns,
                          bool b_transposed, float* c) {
        rows.matmul({.a = a,
                     .b = b,
                     .c = c,
                     .a_stride = a_stride,
                     .b_stride = b_stride,
                     .c_stride = columns,
                     .m = n,
                     .n = columns,
                     .k = n,
                     .b_transposed = b_transposed});
      };
      multiply(scores, plane(), state.keys + h * width * n, n, width, true, query_in + h * n * width);
      rows.transpose(scores, plane(), n, n, square, n);
      multiply(square, n, state.queries + h * n * width, width, width, false, key_in + h * n * width);
      rows.transpose(state.weights + h * n, plane(), n, n, square, n);
      multiply(square, n, value_grad + h * n * v_width, v_width, v_width, false, value_in + h * n * v_width);
    });
  }

  // Through the frame of residue i: adds to the frame's gradient and returns the local point's.
  Vec3 ThroughFrame(int64_t i, const Vec3& global_grad, const Vec3& local) const {
    AddOuter(global_grad, local, rotation_grad + 9 * i);
    AddPoint(global_grad, translation_grad + 3 * i);
    return TurnedBack(state.rotation + 9 * i, global_grad);
  }

  void ProjectionGradients() const {
    const int heads = o().heads, dim = o().dim, points = o().query_points, v_points = o().value_points,
              kv_points = points + v_points;
    const float scale = std::sqrt(1.0F / (3 * static_cast<float>(dim)));
    ForRows(ctx, n, 16, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const float *q_points = state.q_points + i * layer.q_points_.n(),
                    *kv_row = state.kv_points + i * layer.kv_points_.n();
        const float *r = state.rotation + 9 * i, *t = state.centered.data() + 3 * i;
        float *to_q_points = q_points_grad + i * layer.q_points_.n(),
              *to_kv_points = kv_points_grad + i * layer.kv_points_.n();
        for (int h = 0; h < heads; ++h) {
          const float *q = query_in + (h * n + i) * state.width, *k = key_in + (h * n + i) * state.width,
                      *v = value_in + (h * n + i) * state.v_width;
          const float w = layer.point_weights_[h], last_key = k[state.width - 1];
          for (int d = 0; d < dim; ++d) {
            q_grad[i * layer.q_.n() + h * dim + d] = scale * q[d];
            kv_grad[i * layer.kv_.n() + 2 * h * dim + d] = k[d];
            kv_grad[i * layer.kv_.n() + (2 * h + 1) * dim + d] = v[d];
          }
          float weight_grad = 0;
          for (int p = 0; p < points; ++p) {
            const Vec3 local_q = PointOf(q_points, heads * points, h * points + p),
                       local_k = PointOf(kv_row, heads * kv_points, h * kv_points + p);
            Vec3 query = Turned(r, local_q), key = Turned(r, local_k), query_grad, key_grad;
            for (int axis = 0; axis < 3; ++axis) {
              query[axis] += t[axis];
              key[axis] += t[axis];
              const float from_q = q[dim + 3 * p + axis];
              query_grad[axis] = w * from_q;
              key_grad[axis] = k[dim + 3 * p + axis] - w * last_key * key[axis];
              weight_grad += from_q * query[axis] - 0.5F * last_key * key[axis] * key[axis];
            }
            StorePoint(ThroughFrame(i, query_grad, local_q), heads * points, h * points + p, to_q_points);
            StorePoint(ThroughFrame(i, key_grad, local_k), heads * kv_points, h * kv_points + p,
                       to_kv_points);
          }
          for (int p = 0; p < v_points; ++p) {
            const int at = h * kv_points + points + p;
            const float* g = v + dim + 3 * p;
            StorePoint(ThroughFrame(i, {g[0], g[1], g[2]}, PointOf(kv_row, heads * kv_points, at)),
                       heads * kv_points, at, to_kv_points);
          }
          head_grad[i * heads + h] = weight_grad;
        }
      }
    });
  }
};

Status InvariantPointAttention::Backward(const graph::Context& ctx, int64_t n, const float* s, const float* z,
                                         const Frames& frames, const float* mask, const float* out_grad,
                                         const InvariantPointGradients& out,
                                         const GradientMap& parameters) const {
  const GradientScope names(parameters);
  const int heads = options_.heads;
  ASSIGN_OR_RETURN(float* head_weights, names.Get("head_weights", heads));
  ASSIGN_OR_RETURN(const DenseGradients out_grads, DenseGradients::Find(names, "linear_out", out_));
  ASSIGN_OR_RETURN(const DenseGradients bias_grads, DenseGradients::Find(names, "linear_b", bias_));
  const std::pair<const char*, const Dense*> projections[] = {{"linear_q", &q_},
                                                              {"linear_kv", &kv_},
                                                              {"linear_q_points", &q_points_},
                                                              {"linear_kv_points", &kv_points_}};
  std::vector<DenseGradients> grads;
  for (const auto& [name, dense] : projections) {
    ASSIGN_OR_RETURN(const DenseGradients found, DenseGradients::Find(names, name, *dense));
    grads.push_back(found);
  }
  if (n == 0) return OkStatus();
  const graph::ScratchScope scope(ctx);
  State state;
  Project(ctx, n, s, frames, &state);
  state.features = ctx.exec.scratch->Take<float>(n * out_.k()).data();
  state.weights = ctx.exec.scratch->Take<float>(heads * n * n).data();
  Attend(ctx, n, z, mask, nullptr, state);
  BackwardRun run{*this, ctx, n, state, z, out.z};
  run.TakeBuffers();
  AddWeightGradients(ctx, out_grad, c_s(), c_s(), state.features, out_.k(), out_.k(), n, out_grads);
  DenseBackward(out_).Inputs(ctx, out_grad, c_s(), n, run.features_grad, out_.k());
  run.ValueGradients();
  run.ScoreGradients(bias_grads);
  run.OperandGradients();
  run.ProjectionGradients();
  const float* projected[] = {run.q_grad, run.kv_grad, run.q_points_grad, run.kv_points_grad};
  for (size_t i = 0; i < grads.size(); ++i) {
    const Dense& dense = *projections[i].second;
    AddWeightGradients(ctx, projected[i], dense.n(), dense.n(), s, c_s(), c_s(), n, grads[i]);
    if (out.s != nullptr) DenseBackward(dense).Inputs(ctx, projected[i], dense.n(), n, out.s, c_s(), true);
  }
  // w = constant * softplus(head weight), whose derivative is 1 - e^-softplus.
  const float constant = std::sqrt(1.0F / (3 * (static_cast<float>(options_.query_points) * 9 / 2)));
  for (int64_t i = 0; i < n && head_weights != nullptr; ++i) {
    for (int h = 0; h < heads; ++h)
      head_weights[h] +=
          run.head_grad[i * heads + h] * constant * (1 - std::exp(-point_weights_[h] / constant));
  }
  for (int64_t i = 0; i < 9 * n && out.rotation != nullptr; ++i) out.rotation[i] += run.rotation_grad[i];
  // Positions are relative to their mean.
  for (int axis = 0; axis < 3 && out.translation != nullptr; ++axis) {
    double mean = 0;
    for (int64_t i = 0; i < n; ++i) mean += run.translation_grad[3 * i + axis];
    mean /= static_cast<double>(n);
    for (int64_t i = 0; i < n; ++i)
      out.translation[3 * i + axis] += run.translation_grad[3 * i + axis] - static_cast<float>(mean);
  }
  return OkStatus();
}

}  // namespace moesaic::science
