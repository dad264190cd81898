#include "token_scores.h"

// Instruction sets are enabled by function attributes, so that the program also runs on CPUs without them.
#include <immintrin.h>

#include <cstring>

#include "kernels/cpu/amx_tiles-inl.h"
#include "runtime/cpu_features.h"

namespace moesaic::bench {
namespace {

using kernels::kScoreGroup;

constexpr int kStep = 32;  // dimensions of a row of a tile

__attribute__((target("amx-tile,amx-bf16"))) void ScoreByTiles(const TokenScores& t) {
  kernels::cpu::Configure({16, 16, 16, 16, 16, 16, 16, 16});
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const int64_t tile = 16 * t.stride;
  for (int s = 0; s < t.key_dim / kStep; ++s) {
    const std::byte* keys = t.keys + int64_t{64} * s;
    _tile_loadd(4, t.packed + int64_t{1024} * s, 64);
    _tile_loadd(5, keys, t.stride);
    _tile_dpbf16ps(0, 5, 4);
    _tile_loadd(6, keys + tile, t.stride);
    _tile_dpbf16ps(1, 6, 4);
    _tile_loadd(5, keys + 2 * tile, t.stride);
    _tile_dpbf16ps(2, 5, 4);
    _tile_loadd(6, keys + 3 * tile, t.stride);
    _tile_dpbf16ps(3, 6, 4);
  }
  _tile_stored(0, t.scores, 64);
  _tile_stored(1, t.scores + 16 * kScoreGroup, 64);
  _tile_stored(2, t.scores + 32 * kScoreGroup, 64);
  _tile_stored(3, t.scores + 48 * kScoreGroup, 64);
  _tile_release();
}

constexpr int kTogether = 16;  // keys whose sums are in registers

__attribute__((target("avx512f,avx512bf16"))) void ScoreByVectors(const TokenScores& t) {
  for (int first = 0; first < tensor::kKvBlockTokens; first += kTogether) {
    const std::byte* keys = t.keys + first * t.stride;
    __m512 sums[kTogether];
#pragma GCC unroll 16
    for (int i = 0; i < kTogether; ++i) sums[i] = _mm512_setzero_ps();
    // The next block has another address, so nothing is prefetched after the last keys of this one.
    const std::byte* next = first + kTogether < tensor::kKvBlockTokens ? keys + kTogether * t.stride : keys;
    for (int pair = 0; pair < t.key_dim / 2; ++pair) {
      // Prefetches as many lines of the next keys as there are pairs, if rows are adjacent.
      _mm_prefetch(next + int64_t{64} * pair, _MM_HINT_T0);
      const __m512i queries = _mm512_load_si512(t.packed + int64_t{64} * pair);
#pragma GCC unroll 16
      for (int i = 0; i < kTogether; ++i) {
        int both;
        std::memcpy(&both, keys + i * t.stride + int64_t{4} * pair, sizeof(both));
        sums[i] = _mm512_dpbf16_ps(sums[i], reinterpret_cast<__m512bh>(queries),
                                   reinterpret_cast<__m512bh>(_mm512_set1_epi32(both)));
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kTogether; ++i) _mm512_storeu_ps(t.scores + (first + i) * kScoreGroup, sums[i]);
  }
}

}  // namespace

bool CanScoreTokens(tensor::DType dtype, int key_dim) {
  return runtime::DetectCpu().Has(runtime::Isa::kAvx512Bf16) && dtype == tensor::DType::kBF16 &&
         key_dim % kStep == 0;
}

void PackTokenQueries(const TokenScores& t) {
  std::memset(t.packed, 0, size_t(t.key_dim) * 2 * kScoreGroup);
  auto* to = reinterpret_cast<tensor::BF16*>(t.packed);  // [pair of dimensions][row][2]
  for (int r = 0; r < t.rows; ++r) {
    for (int d = 0; d < t.key_dim; ++d) {
      to[(d / 2 * kScoreGroup + r) * 2 + d % 2] = tensor::ToBF16(t.q[size_t(r) * t.key_dim + d] * t.scale);
    }
  }
}

void ScoreTokens(const TokenScores& t) {
  static const bool tiles = runtime::DetectCpu().Has(runtime::Isa::kAmx);
  tiles ? ScoreByTiles(t) : ScoreByVectors(t);
}

}  // namespace moesaic::bench
