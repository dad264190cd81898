// Key summaries of the blocks that a step fills.
#include <algorithm>

#include "base/check.h"
#include "kernels/block_sparsity.h"
#include "kernels/kernel_table.h"
#include "kernels/kv_layer.h"
#include "kernels/sketch.h"

namespace moesaic::kernels {
namespace {

KeySummaryTask TaskOf(const KvLayer& cache, int32_t number, int head) {
  const std::byte* block = cache.base + number * cache.block_stride;
  const int64_t line = int64_t{head} * kKvBlockTokens;  // the first key of this head in its block
  const int64_t key_bytes = tensor::BytesOf(cache.dtype, cache.key_dim);
  const auto* scales = reinterpret_cast<const float*>(block + cache.scale_offset());
  return {.keys = block + head * cache.head_stride(),
          .key_stride = key_bytes,
          .kv_dtype = cache.dtype,
          .key_dim = cache.key_dim,
          .key_split = KeySplit(cache),
          .key_scales = scales + line,
          .rest_scales = scales + kKvBlockTokens,  // shared caches have one head
          .summary = cache.key_summaries + number * cache.key_summary_stride + head * KeySummaryBytes(cache)};
}

}  // namespace

void BuildKeySummaries(const ExecContext& ctx, const BuildKeySummariesParams& params) {
  const KvLayer& cache = params.cache;
  if (cache.key_summaries == nullptr) return;
  MOESAIC_CHECK_LE(cache.key_dim, kMaxKeySummaryDim);
  const size_t mark = ctx.scratch->Mark();
  size_t most = 0;
  for (const SequenceSlice& s : params.sequences) most += s.count / kKvBlockTokens + 1;
  const std::span<int32_t> filled = ctx.scratch->Take<int32_t>(most);
  int64_t count = 0;
  for (const SequenceSlice& s : params.sequences) {
    for (int block = s.start / kKvBlockTokens; (block + 1) * kKvBlockTokens <= s.start + s.count; ++block) {
      filled[count++] = s.block_table[block];
    }
  }
  ctx.pool->Run(count * cache.heads, [&](int64_t task, int) {
    const KeySummaryTask made =
        TaskOf(cache, filled[task / cache.heads], static_cast<int>(task % cache.heads));
    ctx.kernels->key_summary(made);
    if (cache.sketches) MakeSketches(made);
  });
  ctx.scratch->Rewind(mark);
}

}  // namespace moesaic::kernels
