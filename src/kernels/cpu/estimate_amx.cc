// Estimates of blocks by their boxes on AMX tiles of int8: 32 summaries are the rows of two left tiles, as
// stored in memory, and a group's queries are the columns of the right ones.
#include "kernels/cpu/simd_avx512-inl.h"
// Requires the lanes included above:
#include "kernels/cpu/amx_bf16-inl.h"
#include "kernels/cpu/estimate_i8-inl.h"

namespace moesaic::kernels::cpu {
namespace {

constexpr int kSummaries = 32;  // processed together

struct Memory : Queries {
  // Each array is aligned: members of a derived class may begin in its base's padding.
  alignas(64) std::byte centers[kSummaries][kMaxSteps * kInts];
  alignas(64) std::byte radii[kSummaries][kMaxSteps * kInts];
  alignas(64) int32_t products[3][kSummaries][kScoreGroup];
};

constexpr int kNext = 16;  // summaries of the next call that are prefetched at the end of this one

/// Prefetches `bytes` bytes.
inline void Prefetch(const std::byte* from, int64_t bytes) {
  for (int64_t byte = 0; byte < bytes; byte += 64) _mm_prefetch(from + byte, _MM_HINT_T1);
  if (bytes > 0) _mm_prefetch(from + bytes - 1, _MM_HINT_T1);
}
inline void Prefetch(const KeySummaryEstimates& t, int b) {
  if (b < t.count) Prefetch(t.summaries[b], t.prefetch_bytes);
}

inline const KeySummaryHeader& HeaderOf(const std::byte* summary) {
  return *reinterpret_cast<const KeySummaryHeader*>(summary);
}

/// Copies summaries to the layout of tiles.
inline void CopySummaries(const KeySummaryEstimates& t, int first, int count, Memory* m) {
  for (int i = 0; i < count; ++i) {
    const auto* centers = reinterpret_cast<const std::byte*>(&HeaderOf(t.summaries[first + i]) + 1);
    for (int s = 0; s < m->ends[2]; ++s) {
      const Step& step = m->steps[s];
      _mm512_store_si512(m->centers[i] + kInts * s, _mm512_maskz_loadu_epi8(step.mask, centers + step.begin));
      if (t.share == 0) continue;
      _mm512_store_si512(m->radii[i] + kInts * s,
                         _mm512_maskz_loadu_epi8(step.mask, centers + t.key_dim + step.begin));
    }
  }
}

/// Multiplies 32 summaries by a group's part. Queries of several groups come from the L2 cache; their loads
/// carry a hint so that they do not evict the summaries from the L1 cache.
template <bool kSeveral>
inline void Multiply(const KeySummaryEstimates& t, int group, int part, Memory* m) {
  constexpr int64_t kStride = sizeof(m->centers[0]);
  Written();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  for (int s = m->ends[part]; s < m->ends[part + 1]; ++s) {
    const auto* queries = m->queries[group][s];
    const std::byte *centers = m->centers[0] + kInts * s, *radii = m->radii[0] + kInts * s;
    if constexpr (kSeveral) {
      _tile_stream_loadd(6, queries[0], 64);
    } else {
      _tile_loadd(6, queries[0], 64);
    }
    _tile_loadd(7, centers, kStride);
    _tile_dpbssd(0, 7, 6);
    _tile_loadd(7, centers + kTileRows * kStride, kStride);
    _tile_dpbssd(1, 7, 6);
    if constexpr (kSeveral) {
      _tile_stream_loadd(6, queries[1], 64);
    } else {
      _tile_loadd(6, queries[1], 64);
    }
    _tile_dpbssd(3, 7, 6);
    _tile_loadd(7, centers, kStride);
    _tile_dpbssd(2, 7, 6);
    if (t.share == 0) continue;
    if constexpr (kSeveral) {
      _tile_stream_loadd(6, queries[2], 64);
    } else {
      _tile_loadd(6, queries[2], 64);
    }
    _tile_loadd(7, radii, kStride);
    _tile_dpbuud(4, 7, 6);
    _tile_loadd(7, radii + kTileRows * kStride, kStride);
    _tile_dpbuud(5, 7, 6);
  }
  _tile_stored(0, m->products[0][0], 64);
  _tile_stored(1, m->products[0][kTileRows], 64);
  _tile_stored(2, m->products[1][0], 64);
  _tile_stored(3, m->products[1][kTileRows], 64);
  _tile_stored(4, m->products[2][0], 64);
  _tile_stored(5, m->products[2][kTileRows], 64);
  Written();
}

/// scores [count][16] (+)= the part's.
template <bool kAdd>
inline void AddParts(const KeySummaryEstimates& t, int first, int count, int group, int part, const Memory& m,
                     float* scores) {
  for (int i = 0; i < count; ++i, scores += kScoreGroup) {
    const __m512i high = LoadInts(m.products[0][i]), low = LoadInts(m.products[1][i]);
    const KeySummaryHeader& header = HeaderOf(t.summaries[first + i]);
    if (t.share == 0) {
      AddPart<false, kAdd>(header, group, part, m, high, low, high, scores);
    } else {
      AddPart<true, kAdd>(header, group, part, m, high, low, LoadInts(m.products[2][i]), scores);
    }
  }
}

template <bool kSeveral>
inline void Run(const KeySummaryEstimates& t) {
  Memory m;
  const int groups = (t.rows + kScoreGroup - 1) / kScoreGroup;
  for (int b = 0; b < kSummaries; ++b) Prefetch(t, b);
  FindSteps(t, &m);
  for (int group = 0; group < groups; ++group) PackQueries</*kHalves=*/false>(t, group, &m);
  Configure({16, 16, 16, 16, 16, 16, 16, 16});
  for (int first = 0; first < t.count; first += kSummaries) {
    const int count = t.count - first < kSummaries ? t.count - first : kSummaries;
    CopySummaries(t, first, count, &m);
    for (int group = 0; group < groups; ++group) {
      // Prefetches the next summaries, a few between each group's products: issued together they would only
      // wait for each other.
      for (int i = kSummaries * group / groups; i < kSummaries * (group + 1) / groups; ++i) {
        Prefetch(t, first + kSummaries + i);
      }
      float* scores = t.scores + (group * t.stride + first) * kScoreGroup;
      Multiply<kSeveral>(t, group, 0, &m);
      AddParts<false>(t, first, count, group, 0, m, scores);
      if (m.ends[1] == m.ends[2]) continue;
      Multiply<kSeveral>(t, group, 1, &m);
      AddParts<true>(t, first, count, group, 1, m, scores);
    }
  }
  _tile_release();
  for (int b = 0; b < t.next_count && b < kNext; ++b) Prefetch(t.next[b], t.next_prefetch_bytes);
}

}  // namespace

void KeySummaryEstimatesAmx(const KeySummaryEstimates& t) {
  if (t.rows <= kScoreGroup) {
    Run<false>(t);
  } else {
    Run<true>(t);
  }
}

}  // namespace moesaic::kernels::cpu
