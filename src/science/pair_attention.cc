#include "science/pair_attention.h"

#include <algorithm>
#include <limits>

#include "science/dense_gradient.h"
#include "science/run_tasks.h"

namespace moesaic::science {
namespace {

constexpr int64_t kQueryTile = 48;  // a multiple of the product's 6 rows; with 512 keys, scores take 96 KiB

struct AttentionBuffers {
  float *keys, *q, *scores;  // [dim, keys], [kQueryTile, dim], [kQueryTile, keys]
  // Backward: [keys, v_dim], [kQueryTile, keys], [keys, kQueryTile]
  float *values = nullptr, *score_grad = nullptr, *transposed = nullptr;
};

AttentionBuffers TakeBuffers(const graph::Context& ctx, const PairAttentionParams& p) {
  auto take = [&](int64_t count) { return ctx.exec.scratch->Take<float>(count).data(); };
  return {take(p.dim * p.keys), take(kQueryTile * p.dim), take(kQueryTile * p.keys)};
}

void LoadKeys(const graph::Context& ctx, const PairAttentionParams& p, int64_t b, int head,
              const AttentionBuffers& buffers) {
  ctx.graph->rows.transpose(p.k.data + b * p.k.batch_stride + int64_t{head} * p.dim, p.k.stride, p.keys,
                            p.dim, buffers.keys, p.keys);
}

// Weights of queries [first, first + count) after the softmax, in buffers.scores.
void ComputeWeights(const graph::Context& ctx, const PairAttentionParams& p, int64_t b, int head,
                    int64_t first, int64_t count, const AttentionBuffers& buffers) {
  const graph::RowKernels& rows = ctx.graph->rows;
  const float* q = p.q.data + b * p.q.batch_stride + int64_t{head} * p.dim;
  for (int64_t i = 0; i < count; ++i) {
    for (int d = 0; d < p.dim; ++d) buffers.q[i * p.dim + d] = p.scale * q[(first + i) * p.q.stride + d];
  }
  rows.matmul({.a = buffers.q,
               .b = buffers.keys,
               .c = buffers.scores,
               .a_stride = p.dim,
               .b_stride = p.keys,
               .c_stride = p.keys,
               .m = count,
               .n = p.keys,
               .k = p.dim});
  for (int64_t i = 0; i < count; ++i) {
    float* scores = buffers.scores + i * p.keys;
    if (p.bias != nullptr)
      ctx.exec.kernels->axpy(1, p.bias + (head * p.queries + first + i) * p.keys, static_cast<int>(p.keys),
                             scores);
    if (p.mask != nullptr) {
      const float* mask = p.mask + b * p.mask_batch_stride;
      for (int64_t j = 0; j < p.keys; ++j) {
        if (mask[j * p.mask_stride] == 0) scores[j] = -std::numeric_limits<float>::infinity();
      }
    }
    rows.softmax(scores, static_cast<int>(p.keys));
  }
}

void AttendOne(const graph::Context& ctx, const PairAttentionParams& p, int64_t b, int head,
               const AttentionBuffers& buffers) {
  LoadKeys(ctx, p, b, head, buffers);
  for (int64_t first = 0; first < p.queries; first += kQueryTile) {
    const int64_t count = std::min(kQueryTile, p.queries - first);
    ComputeWeights(ctx, p, b, head, first, count, buffers);
    ctx.graph->rows.matmul(
        {.a = buffers.scores,
         .b = p.v.data + b * p.v.batch_stride + int64_t{head} * p.v_dim,
         .c = p.out + b * p.out_batch_stride + first * p.out_stride + int64_t{head} * p.v_dim,
         .a_stride = p.keys,
         .b_stride = p.v.stride,
         .c_stride = p.out_stride,
         .m = count,
         .n = p.v_dim,
         .k = p.keys});
  }
}

// Adds the transpose of x [count, keys] times y [count, columns] to out.
void AddTransposedProduct(const graph::Context& ctx, const float* x, int64_t count, int64_t keys,
                          const float* y, int64_t y_stride, int columns, const AttentionBuffers& buffers,
                          float* out, int64_t out_stride) {
  ctx.graph->rows.transpose(x, keys, count, keys, buffers.transposed, kQueryTile);
  ctx.graph->rows.matmul({.a = buffers.transposed,
                          .b = y,
                          .c = out,
                          .a_stride = kQueryTile,
                          .b_stride = y_stride,
                          .c_stride = out_stride,
                          .m = keys,
                          .n = columns,
                          .k = count,
                          .accumulate = true});
}

// The gradients of one head of one batch. bias_grad is [heads, queries, keys] or null.
void AttendOneBackward(const graph::Context& ctx, const PairAttentionParams& p,
                       const PairAttentionGradients& grads, int64_t b, int head,
                       const AttentionBuffers& buffers, float* bias_grad) {
  const graph::RowKernels& rows = ctx.graph->rows;
  LoadKeys(ctx, p, b, head, buffers);
  const float* v = p.v.data + b * p.v.batch_stride + int64_t{head} * p.v_dim;
  for (int64_t j = 0; j < p.keys; ++j) std::copy_n(v + j * p.v.stride, p.v_dim, buffers.values + j * p.v_dim);
  float* k_grad = grads.k + b * p.k.batch_stride + int64_t{head} * p.dim;
  float* v_grad = grads.v + b * p.v.batch_stride + int64_t{head} * p.v_dim;
  for (int64_t j = 0; j < p.keys; ++j) {
    std::fill_n(k_grad + j * p.k.stride, p.dim, 0.0F);
    std::fill_n(v_grad + j * p.v.stride, p.v_dim, 0.0F);
  }
  for (int64_t first = 0; first < p.queries; first += kQueryTile) {
    const int64_t count = std::min(kQueryTile, p.queries - first);
    ComputeWeights(ctx, p, b, head, first, count, buffers);
    const float* out_grad =
        grads.out + b * p.out_batch_stride + first * p.out_stride + int64_t{head} * p.v_dim;
    AddTransposedProduct(ctx, buffers.scores, count, p.keys, out_grad, p.out_stride, p.v_dim, buffers, v_grad,
                         p.v.stride);
    rows.matmul({.a = out_grad,
                 .b = buffers.values,
                 .c = buffers.score_grad,
                 .a_stride = p.out_stride,
                 .b_stride = p.v_dim,
                 .c_stride = p.keys,
                 .m = count,
                 .n = p.keys,
                 .k = p.v_dim,
                 .b_transposed = true});
    for (int64_t i = 0; i < count; ++i) {
      const float* w = buffers.scores + i * p.keys;
      float *g = buffers.score_grad + i * p.keys, dot = 0;
      for (int64_t j = 0; j < p.keys; ++j) dot += w[j] * g[j];
      for (int64_t j = 0; j < p.keys; ++j) g[j] = w[j] * (g[j] - dot);
      if (bias_grad != nullptr)
        ctx.exec.kernels->axpy(1, g, static_cast<int>(p.keys),
                               bias_grad + (head * p.queries + first + i) * p.keys);
    }
    // buffers.q has the scale already.
    AddTransposedProduct(ctx, buffers.score_grad, count, p.keys, buffers.q, p.dim, p.dim, buffers, k_grad,
                         p.k.stride);
    float* q_grad = grads.q + b * p.q.batch_stride + first * p.q.stride + int64_t{head} * p.dim;
    rows.matmul({.a = buffers.score_grad,
                 .b = buffers.keys,
                 .c = q_grad,
                 .a_stride = p.keys,
                 .b_stride = p.keys,
                 .c_stride = p.q.stride,
                 .m = count,
                 .n = p.dim,
                 .k = p.keys,
                 .b_transposed = true});
    for (int64_t i = 0; i < count; ++i) {
      for (int d = 0; d < p.dim; ++d) q_grad[i * p.q.stride + d] *= p.scale;
    }
  }
}

}  // namespace

void PairAttention(const graph::Context& ctx, const PairAttentionParams& p) {
  const graph::ScratchScope scope(ctx);
  std::vector<AttentionBuffers> buffers;
  for (int w = 0; w < ctx.exec.pool->size(); ++w) buffers.push_back(TakeBuffers(ctx, p));
  ctx.exec.pool->Run(p.batch * p.heads, [&](int64_t task, int worker) {
    AttendOne(ctx, p, task / p.heads, static_cast<int>(task % p.heads), buffers[worker]);
  });
}

void PairAttentionBackward(const graph::Context& ctx, const PairAttentionParams& p,
                           const PairAttentionGradients& grads) {
  const graph::ScratchScope scope(ctx);
  auto take = [&](int64_t count) { return ctx.exec.scratch->Take<float>(count).data(); };
  std::vector<AttentionBuffers> buffers;
  for (int w = 0; w < ctx.exec.pool->size(); ++w) {
    buffers.push_back(TakeBuffers(ctx, p));
    buffers[w].values = take(p.keys * p.v_dim);
    buffers[w].score_grad = take(kQueryTile * p.keys);
    buffers[w].transposed = take(p.keys * kQueryTile);
  }
  if (grads.bias == nullptr) {
    ctx.exec.pool->Run(p.batch * p.heads, [&](int64_t task, int worker) {
      AttendOneBackward(ctx, p, grads, task / p.heads, static_cast<int>(task % p.heads), buffers[worker],
                        nullptr);
    });
    return;
  }
  // The batch shares the bias. A fixed number of parts of the batch have sums of their own, which are added
  // in order.
  constexpr int64_t kParts = 4;
  const int64_t parts = std::min(kParts, p.batch), plane = p.queries * p.keys, size = p.heads * plane;
  float* partial = take(parts * size);
  ctx.exec.pool->Run(parts * p.heads, [&](int64_t task, int worker) {
    const int64_t part = task / p.heads, head = task % p.heads;
    float* own = partial + part * size;
    std::fill_n(own + head * plane, plane, 0.0F);
    for (int64_t b = part * p.batch / parts; b < (part + 1) * p.batch / parts; ++b)
      AttendOneBackward(ctx, p, grads, b, static_cast<int>(head), buffers[worker], own);
  });
  for (int64_t part = 0; part < parts; ++part) AddTo(ctx, partial + part * size, size, grads.bias);
}

}  // namespace moesaic::science
