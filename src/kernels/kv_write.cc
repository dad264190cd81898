#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "base/check.h"
#include "base/round.h"
#include "kernels/attention.h"

namespace moesaic::kernels {
namespace {

// About the number of floats that one core stores during a round trip through the pool.
constexpr int64_t kTaskFloats = 16 << 10;

void WriteRow(const float* from, tensor::DType dtype, int dim, std::byte* to) {
  if (dtype == tensor::DType::kF32) {
    std::memcpy(to, from, dim * sizeof(float));
    return;
  }
  auto* bits = reinterpret_cast<tensor::BF16*>(to);
  for (int i = 0; i < dim; ++i) bits[i] = tensor::ToBF16(from[i]);
}

// Plain loops over integers and single operations, which compilers vectorize; the bits are the same on every
// machine.
float QuantizeRow(const float* from, int dim, std::byte* to) {
  // bits of magnitudes, which are ordered like the magnitudes; NaN's are above infinity's
  uint32_t largest = 0;
  for (int i = 0; i < dim; ++i) {
    largest = std::max(largest, std::bit_cast<uint32_t>(from[i]) & 0x7fffffffU);
  }
  const auto amax = std::bit_cast<float>(largest);
  const bool finite = largest < 0x7f800000U;
  constexpr float kTiny = 1e-36F;  // 127 / amax would overflow
  if (!finite || amax < kTiny) {
    std::fill_n(to, dim, std::byte{0});
    return finite ? 0 : std::numeric_limits<float>::quiet_NaN();
  }
  const float inverse = 127 / amax;
  constexpr float kRound = 0x1.8p23F;  // adding it rounds to an integer
  auto* q = reinterpret_cast<int8_t*>(to);
  for (int i = 0; i < dim; ++i) {
    q[i] = static_cast<int8_t>(std::bit_cast<int32_t>(from[i] * inverse + kRound));
  }
  return amax / 127;
}

void QuantizeToken(const KvWriteParams& p, int64_t row, int64_t slot, std::byte* block) {
  const KvLayer& cache = p.cache;
  auto* scales = reinterpret_cast<float*>(block + cache.scale_offset());
  float* more_scales = scales + int64_t{cache.heads} * kKvBlockTokens;
  const int64_t head_stride = cache.head_stride(), value_offset = cache.value_offset();
  for (int head = 0; head < cache.heads; ++head) {
    const int64_t line = int64_t{head} * kKvBlockTokens + slot;
    const float* key = p.keys + row * p.key_stride + int64_t{head} * cache.key_dim;
    const int split = KeySplit(cache);
    std::byte* keys = block + head * head_stride;
    std::byte* to = keys + slot * cache.key_dim;
    scales[line] = QuantizeRow(key, split, to);
    more_scales[line] = cache.shared
                            ? QuantizeRow(key + split, cache.key_dim - split, to + split)
                            : QuantizeRow(p.values + row * p.value_stride + int64_t{head} * cache.value_dim,
                                          cache.value_dim, keys + value_offset + slot * cache.value_dim);
  }
}

void WriteToken(const KvWriteParams& p, const SequenceSlice& sequence, int token) {
  const KvLayer& cache = p.cache;
  const int64_t element = tensor::BytesOf(cache.dtype, 1);
  const int position = sequence.start + token;
  const int64_t row = sequence.row + token;
  const int64_t slot = position % kKvBlockTokens;
  std::byte* block = cache.base + sequence.block_table[position / kKvBlockTokens] * cache.block_stride;
  if (cache.dtype == tensor::DType::kI8) return QuantizeToken(p, row, slot, block);
  const int64_t head_stride = cache.head_stride(), value_offset = cache.value_offset();
  for (int head = 0; head < cache.heads; ++head) {
    std::byte* keys = block + head * head_stride;
    WriteRow(p.keys + row * p.key_stride + int64_t{head} * cache.key_dim, cache.dtype, cache.key_dim,
             keys + slot * cache.key_dim * element);
    if (cache.shared) continue;
    WriteRow(p.values + row * p.value_stride + int64_t{head} * cache.value_dim, cache.dtype, cache.value_dim,
             keys + value_offset + slot * cache.value_dim * element);
  }
}

}  // namespace

void KvWrite(const ExecContext& ctx, const KvWriteParams& p) {
  const KvLayer& cache = p.cache;
  MOESAIC_CHECK(cache.dtype == tensor::DType::kF32 || cache.dtype == tensor::DType::kBF16 ||
                cache.dtype == tensor::DType::kI8);
  const size_t mark = ctx.scratch->Mark();
  // Tokens are numbered across all sequences: before[i] is the number of tokens before sequence i.
  const auto before = ctx.scratch->Take<int64_t>(p.sequences.size() + 1);
  before[0] = 0;
  for (size_t i = 0; i < p.sequences.size(); ++i) before[i + 1] = before[i] + p.sequences[i].count;
  const int64_t tokens = before.back();
  const int64_t floats = int64_t{cache.heads} * (cache.key_dim + (cache.shared ? 0 : cache.value_dim));
  const int64_t run = std::max<int64_t>(kTaskFloats / floats, 1);
  ctx.pool->Run(base::CeilDiv(tokens, run), [&](int64_t task, int) {
    int64_t token = task * run;
    const int64_t end = std::min(token + run, tokens);
    auto i = std::upper_bound(before.begin(), before.end(), token) - before.begin() - 1;
    for (; token < end; ++token) {
      while (token >= before[i + 1]) ++i;
      WriteToken(p, p.sequences[i], static_cast<int>(token - before[i]));
    }
  });
  ctx.scratch->Rewind(mark);
}

}  // namespace moesaic::kernels
