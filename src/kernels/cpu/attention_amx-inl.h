// Packs queries, keys and values into AMX tiles and prefetches the next ones, for attention_amx.cc, which
// explains the algorithm. simd_avx512-inl.h must be included first.
#pragma once

#include "kernels/cpu/amx_bf16-inl.h"
#include "kernels/micro_kernels.h"

namespace moesaic::kernels::cpu {
namespace {

constexpr int kMaxKeyDim = 576;  // DeepSeek's latent and rope part
constexpr int kMaxValueDim = 512;
constexpr int kKeys = kAttentionRuns * kBlockKeys;
constexpr int kSteps = kKeys / kStep;
constexpr int kBlockTiles = 4;  // tiles of 16 value dimensions: their sums take half of the tile registers

/// Prefetches the lines of the next call's keys and values in the order in which it reads them. The
/// prefetches are spread over the current work. Issued together they would fill the buffers that the work's
/// own loads need, and the memory would idle afterwards.
class Stream {
 public:
  /// Distributes all prefetches over `slots` calls of Prefetch.
  Stream(const AttentionTile& t, int slots) {
    int64_t units = 0;
    for (int part = 0; part < (t.value_offset == 0 ? 1 : 2); ++part) {
      for (int i = 0; i < kAttentionRuns && t.after[i] != nullptr; ++i) {
        const std::byte* first = t.after[i] + (part == 0 ? 0 : t.value_offset);
        const int64_t bytes = kBlockKeys * (part == 0 ? t.key_stride : t.value_stride);
        ranges_[count_++] = {first, first + bytes};
        units += bytes / kUnit;
        if (t.kv_dtype != tensor::DType::kI8) continue;
        const int64_t scales = t.after_scales + (part == 1 ? t.value_scales : t.key_scales);
        const int64_t rest = t.key_split < t.key_dim ? t.after_scales + t.rest_scales : scales;
        for (int byte = 0; byte < kBlockKeys * 4; byte += 64) {
          _mm_prefetch(t.after[i] + scales + byte, _MM_HINT_T1);
          if (rest != scales) _mm_prefetch(t.after[i] + rest + byte, _MM_HINT_T1);
        }
      }
    }
    share_ = slots > 0 ? static_cast<int>((units + slots - 1) / slots) : 0;
    Next();
  }

  /// Issues one share of the prefetches.
  void Prefetch() {
    for (int i = 0; i < share_; ++i) {
      if (at_ == end_) return;
      _mm_prefetch(at_, _MM_HINT_T1);
      _mm_prefetch(at_ + 64, _MM_HINT_T1);
      at_ += kUnit;
      if (at_ == end_) Next();
    }
  }

 private:
  static constexpr int kUnit = 128;  // bytes: rows are multiples of 16 dimensions, and 64 rows are contiguous
  struct ByteRange {
    const std::byte *first, *end;
  };

  void Next() {
    if (now_ == count_) return;
    at_ = ranges_[now_].first;
    end_ = ranges_[now_++].end;
  }

  ByteRange ranges_[2 * kAttentionRuns];
  int count_ = 0, now_ = 0, share_ = 0;
  const std::byte *at_ = nullptr, *end_ = nullptr;
};

/// Packs up to R query rows of a tile, from `first` on, as B tiles [step][high, low][dim pair][row][2];
/// missing rows are 0.
template <int R>
inline void PackQueries(const AttentionTile& t, int first, std::byte* to) {
  constexpr int kBytes = kTileRows * R * 4;
  for (int s = 0; s < t.key_dim / kStep; ++s) {
    __m512i parts[2][kTileRows];
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) {
      parts[0][i] = parts[1][i] = _mm512_setzero_si512();
      if (i >= R || first + i >= t.rows) continue;
      V even, odd;
      LoadPairs(t.q + (first + i) * t.q_stride + kStep * s, &even, &odd);
      const __m512i upper_even = UpperBF16(even), upper_odd = UpperBF16(odd);
      parts[0][i] = Pairs(upper_even, upper_odd);
      parts[1][i] =
          Pairs(UpperBF16(RoundingError(even, upper_even)), UpperBF16(RoundingError(odd, upper_odd)));
    }
    for (auto& part : parts) {
      Transpose(part);
#pragma GCC unroll 16
      for (int i = 0; i < kTileRows; ++i) {
        if constexpr (R == 16) {
          _mm512_store_si512(to + 64 * i, part[i]);
        } else {
          _mm256_store_si256(reinterpret_cast<__m256i*>(to + 32 * i), _mm512_castsi512_si256(part[i]));
        }
      }
      to += kBytes;
    }
  }
}

/// Converts the first `seen` int8 keys (rounded up to 32) from `keys` on to bfloat16.
inline void WidenKeys(const AttentionTile& t, const std::byte* keys, int seen,
                      std::byte (*to)[2 * kMaxKeyDim]) {
  const int rows = (seen + kStep - 1) / kStep * kStep;
  for (int key = 0; key < rows; ++key) {
    const auto* from = reinterpret_cast<const int8_t*>(keys + key * t.key_stride);
    for (int d = 0; d < t.key_dim; d += kStep) {
      _mm512_store_si512(to[key] + 2 * d, Narrow(Load(from + d), Load(from + d + 16)));
    }
  }
}

/// Interleaving of two rows of 32 bfloat16: the first 16 of each, and the others.
alignas(64) constexpr uint16_t kOrder[2][32] = {
    {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
    {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
     24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};

/// Interleaves the values of two keys, of which at most `left` are visible; values visible to no row are
/// undefined in memory and become 0. Writes T tiles of 16 dimensions from d on, kTileBytes apart; T is 1 or
/// even.
template <int T>
inline void PackPair(const AttentionTile& t, const std::byte* values, int left, int d, std::byte* to) {
  const __mmask32 even = left > 0 ? ~0U : 0, odd = left > 1 ? ~0U : 0;
  if (t.kv_dtype == tensor::DType::kI8) {
    const std::byte* at = values + d;
#pragma GCC unroll 4
    for (int i = 0; i < T; ++i, at += 16, to += kTileBytes) {
      const __m512i a = Widen(_mm_maskz_loadu_epi8(static_cast<__mmask16>(even), at));
      const __m512i b = Widen(_mm_maskz_loadu_epi8(static_cast<__mmask16>(odd), at + t.value_stride));
      _mm512_store_si512(to, Pairs(a, b));
    }
    return;
  }
  const __m512i first = _mm512_load_si512(kOrder[0]), second = _mm512_load_si512(kOrder[1]);
  const std::byte* at = values + 2 * d;
  constexpr __mmask32 kDims = T == 1 ? 0xffffU : ~0U;
#pragma GCC unroll 2
  for (int i = 0; i < T; i += 2, at += 64, to += 2 * kTileBytes) {
    const __m512i a = _mm512_maskz_loadu_epi16(even & kDims, at);
    const __m512i b = _mm512_maskz_loadu_epi16(odd & kDims, at + t.value_stride);
    _mm512_store_si512(to, _mm512_permutex2var_epi16(a, first, b));
    if constexpr (T > 1) _mm512_store_si512(to + kTileBytes, _mm512_permutex2var_epi16(a, second, b));
  }
}

/// Returns the values of keys [32 s, ...).
inline const std::byte* ValuesOf(const AttentionTile& t, int s) {
  return t.runs[s * kStep / kBlockKeys] + t.value_offset + s * kStep % kBlockKeys * t.value_stride;
}

/// Interleaves the values of keys [32 s, 32 s + 32) in pairs; keys below `seen` are visible. Layout:
/// [tile][key pair][16 dims][2].
template <int T>
inline void PackValues(const AttentionTile& t, int s, int seen, int d, Stream* stream, std::byte* tiles) {
  const std::byte* values = ValuesOf(t, s);
  for (int key = 0; key < kStep; key += 2, values += 2 * t.value_stride) {
    stream->Prefetch();
    PackPair<T>(t, values, seen - s * kStep - key, d, tiles + 32 * key);
  }
}

/// Interleaves all values, as far as possible between the products with the same keys. The vector units are
/// idle there, and where values are the keys' first dimensions, these are in the L1 cache.
class ValuePacker {
 public:
  /// Writes [value_dim / 16][step]; for each step the tiles of a block of kBlockTiles are contiguous.
  ValuePacker(const AttentionTile& t, int seen, std::byte* to) : t_(t), seen_(seen), to_(to) {}

  static int64_t Offset(int d, int s, int tiles) {
    return (int64_t{d} / 16 * kSteps + int64_t{s} * tiles) * kTileBytes;
  }

  /// Pairs of keys, 64 bfloat16 dimensions of each, that the caller interleaves between other work.
  struct Chunk {
    const std::byte* from;
    std::byte* to;
    int64_t stride;  // bytes between values
    int pairs;
  };
  inline static void PackNext(Chunk* c, __m512i first, __m512i second) {
    const __m512i a = _mm512_loadu_si512(c->from), b = _mm512_loadu_si512(c->from + c->stride);
    const __m512i x = _mm512_loadu_si512(c->from + 64), y = _mm512_loadu_si512(c->from + c->stride + 64);
    _mm512_store_si512(c->to, _mm512_permutex2var_epi16(a, first, b));
    _mm512_store_si512(c->to + kTileBytes, _mm512_permutex2var_epi16(a, second, b));
    _mm512_store_si512(c->to + 2 * kTileBytes, _mm512_permutex2var_epi16(x, first, y));
    _mm512_store_si512(c->to + 3 * kTileBytes, _mm512_permutex2var_epi16(x, second, y));
    c->from += 2 * c->stride;
    c->to += 64;
  }

  /// Starts with the values of keys [32 s, 32 s + 32).
  void Begin(int s) {
    step_ = s;
    pair_ = d_ = 0;
    values_ = ValuesOf(t_, s);
  }
  /// Hands out up to `most` pairs. Partly visible steps and int8 are left to Finish.
  Chunk Take(int most) {
    const bool block = d_ + 16 * kBlockTiles <= t_.value_dim;
    if (!block || t_.kv_dtype != tensor::DType::kBF16 || seen_ < (step_ + 1) * kStep) return {};
    const int pairs = most < kPairs - pair_ ? most : kPairs - pair_;
    const Chunk chunk{values_ + 2 * pair_ * t_.value_stride + 2 * d_,
                      to_ + Offset(d_, step_, kBlockTiles) + 64 * pair_, t_.value_stride, pairs};
    pair_ += pairs;
    if (pair_ == kPairs) {
      pair_ = 0;
      d_ += 16 * kBlockTiles;
    }
    return chunk;
  }
  /// Packs the rest of the step.
  void Finish() {
    while (d_ < t_.value_dim) {
      const int key = 2 * pair_, left = seen_ - step_ * kStep - key;
      const std::byte* from = values_ + key * t_.value_stride;
      const int tiles = d_ + 16 * kBlockTiles <= t_.value_dim ? kBlockTiles : 1;
      std::byte* to = to_ + Offset(d_, step_, tiles) + 32 * key;
      if (tiles > 1) {
        PackPair<kBlockTiles>(t_, from, left, d_, to);
      } else {
        PackPair<1>(t_, from, left, d_, to);
      }
      if (++pair_ < kPairs) continue;
      pair_ = 0;
      d_ += 16 * tiles;
    }
  }

 private:
  static constexpr int kPairs = kStep / 2;

  const AttentionTile& t_;
  int seen_;
  std::byte* to_;
  const std::byte* values_ = nullptr;
  int step_ = 0, pair_ = 0, d_ = 0;
};

/// Stores 8 rows of two times 8 dwords as 8 rows of 16: row j holds dword j of rows 0 .. 7, then dword j + 8
/// of rows 0 .. 7.
inline void StoreColumns8(const __m512i* r, std::byte* tile) {
  __m512i a[8], b[8];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    a[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {  // b[4 i + j]: column j of each 128 bits, of rows 4 i .. 4 i + 3
    b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
  const __m512i even = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13);
  const __m512i odd = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    _mm512_store_si512(tile + 64 * j, _mm512_permutex2var_epi64(b[j], even, b[4 + j]));
    _mm512_store_si512(tile + 64 * (4 + j), _mm512_permutex2var_epi64(b[j], odd, b[4 + j]));
  }
}

}  // namespace
}  // namespace moesaic::kernels::cpu
