#include "science/pair_attention.h"

#include <algorithm>
#include <limits>

#include "science/run_tasks.h"

namespace moesaic::science {
namespace {

constexpr int64_t kQueryTile = 48;  // a multiple of the product's 6 rows; with 512 keys, scores take 96 KiB

struct AttentionBuffers {
  float *keys, *q, *scores;
};

void AttendOne(const graph::Context& ctx, const PairAttentionParams& p, int64_t b, int head,
               const AttentionBuffers& buffers) {
  const graph::RowKernels& rows = ctx.graph->rows;
  const float* k = p.k.data + b * p.k.batch_stride + int64_t{head} * p.dim;
  for (int64_t j = 0; j < p.keys; ++j) {
    for (int d = 0; d < p.dim; ++d) buffers.keys[d * p.keys + j] = k[j * p.k.stride + d];
  }
  for (int64_t first = 0; first < p.queries; first += kQueryTile) {
    const int64_t count = std::min(kQueryTile, p.queries - first);
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
    rows.matmul({.a = buffers.scores,
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

}  // namespace

void PairAttention(const graph::Context& ctx, const PairAttentionParams& p) {
  const graph::ScratchScope scope(ctx);
  std::vector<AttentionBuffers> buffers;
  runtime::Arena& scratch = *ctx.exec.scratch;
  for (int w = 0; w < ctx.exec.pool->size(); ++w) {
    buffers.push_back({scratch.Take<float>(p.dim * p.keys).data(),
                       scratch.Take<float>(kQueryTile * p.dim).data(),
                       scratch.Take<float>(kQueryTile * p.keys).data()});
  }
  ctx.exec.pool->Run(p.batch * p.heads, [&](int64_t task, int worker) {
    AttendOne(ctx, p, task / p.heads, static_cast<int>(task % p.heads), buffers[worker]);
  });
}

}  // namespace moesaic::science
