// Estimates of blocks by their boxes on AMX tiles of int8: digests, by 32, are the rows of two left tiles as
// they stand in memory, and queries in groups of 16 the columns of the right ones.
//
//   scores [digest][row] = scale_c C (128 q_high + q_low)^T + share * min(scale_r R |q|^T, ball |q|_2)
//
// A part of a query is q_high in int8, what that leaves out in steps 128 times as fine, and |q| in uint8: off
// by 1/32512 and by 1/510 of its largest element.
#include "kernels/cpu/digest.h"
#include "kernels/cpu/simd_avx512-inl.h"
// After the lanes:
#include "kernels/cpu/amx_bf16-inl.h"

namespace moesaic::kernels::cpu {
namespace {

constexpr int kDigests = 32;  // at a time
constexpr int kMostGroups = kMostEstimateRows / kScoreGroup;
constexpr int kInts = 64;  // elements in a row of a tile
// 2^31 / (128 * 127 * 127) dimensions do not overflow; a second part begins a step of its own.
constexpr int kMostKeyDim = 1024, kMostSteps = 11;
constexpr int kFine = 128;

/// Dimensions [begin, begin + dims) of a digest's part, at most 64.
struct Step {
  int begin;
  __mmask64 mask;
};

struct alignas(64) Memory {
  std::byte queries[kMostGroups][kMostSteps][3][kTileBytes];  // high, low, magnitudes
  float scales[kMostGroups][2][kScoreGroup];                  // of products with centers, by part
  float reaches[kMostGroups][2][kScoreGroup];                 // with radii, times share
  float norms[kMostGroups][2][kScoreGroup];                   // of the rows' parts, times share
  std::byte centers[kDigests][kMostSteps * kInts];
  std::byte radii[kDigests][kMostSteps * kInts];
  int32_t products[3][kDigests][kScoreGroup];
  Step steps[kMostSteps];
  int ends[3] = {0, 0, 0};  // steps of the parts
};

inline void FindSteps(const DigestEstimates& t, Memory* m) {
  const int ends[3] = {0, t.key_split, t.key_dim};
  int count = 0;
  for (int part = 0; part < 2; ++part) {
    for (int d = ends[part]; d < ends[part + 1]; d += kInts) {
      const int left = ends[part + 1] - d;
      m->steps[count++] = {d, left < kInts ? (__mmask64{1} << left) - 1 : ~__mmask64{0}};
    }
    m->ends[part + 1] = count;
  }
}

/// Sixteen of a row's elements, scaled; zeros past a step's end.
inline V LoadQuery(const DigestEstimates& t, int row, const Step& step, int quarter) {
  const auto mask = static_cast<__mmask16>(step.mask >> 16 * quarter);
  return Mul(_mm512_maskz_loadu_ps(mask, t.q + row * t.q_stride + step.begin + 16 * quarter), Set(t.scale));
}

/// Four times sixteen numbers as bytes, in their order.
template <bool kSigned>
inline __m512i PackBytes(const __m512i* x) {
  const __m512i ab = _mm512_packs_epi32(x[0], x[1]), cd = _mm512_packs_epi32(x[2], x[3]);
  const __m512i bytes = kSigned ? _mm512_packs_epi16(ab, cd) : _mm512_packus_epi16(ab, cd);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, bytes);
}

/// What a row's part is divided by; zero where there is nothing to divide, and NaN as its scale where it is
/// not finite.
inline void MeasurePart(const DigestEstimates& t, int group, int i, int part, float* inverse, Memory* m) {
  V most = Zero(), squares = Zero();
  for (int s = m->ends[part]; s < m->ends[part + 1]; ++s) {
    for (int quarter = 0; quarter < 4; ++quarter) {
      const V x = LoadQuery(t, group * kScoreGroup + i, m->steps[s], quarter);
      most = Max(Abs(x), most);
      squares = Fma(x, x, squares);
    }
  }
  const float square = SumLanes(squares), largest = _mm512_reduce_max_ps(most);
  const bool some = largest > 1e-30F, finite = square - square == 0;
  *inverse = some && finite ? 127 / largest : 0;
  const float wrong = square - square;  // NaN, or 0
  m->scales[group][part][i] = (some ? largest / (127 * kFine) : 0) + wrong;
  m->reaches[group][part][i] = (some ? t.share * largest / 254 : 0) + wrong;
  m->norms[group][part][i] = t.share * __builtin_sqrtf(square);
}

inline void PackQueries(const DigestEstimates& t, int group, Memory* m) {
  float inverses[2][kScoreGroup] = {};
  const int left = t.rows - group * kScoreGroup, rows = left < kScoreGroup ? left : kScoreGroup;
  for (int part = 0; part < 2; ++part) {
    for (int i = 0; i < kScoreGroup; ++i) {
      m->scales[group][part][i] = m->reaches[group][part][i] = m->norms[group][part][i] = 0;
      if (i < rows) MeasurePart(t, group, i, part, &inverses[part][i], m);
    }
  }
  for (int s = 0; s < m->ends[2]; ++s) {
    const int part = s < m->ends[1] ? 0 : 1;
    __m512i high[kScoreGroup], low[kScoreGroup], size[kScoreGroup];
#pragma GCC unroll 16
    for (int i = 0; i < kScoreGroup; ++i) {
      high[i] = low[i] = size[i] = _mm512_setzero_si512();
      if (i >= rows) continue;
      const V inverse = Set(inverses[part][i]);
      __m512i a[4], b[4], c[4];
#pragma GCC unroll 4
      for (int quarter = 0; quarter < 4; ++quarter) {
        const V x = Mul(LoadQuery(t, group * kScoreGroup + i, m->steps[s], quarter), inverse);
        a[quarter] = ToInts(x);
        b[quarter] = ToInts(Mul(Sub(x, ToFloats(a[quarter])), Set(kFine)));
        c[quarter] = ToInts(Mul(Abs(x), Set(2)));
      }
      high[i] = PackBytes<true>(a);
      low[i] = PackBytes<true>(b);
      size[i] = PackBytes<false>(c);
    }
    StoreColumns(high, m->queries[group][s][0]);
    StoreColumns(low, m->queries[group][s][1]);
    if (t.share != 0) StoreColumns(size, m->queries[group][s][2]);
  }
}

inline const DigestHeader& HeaderOf(const std::byte* digest) {
  return *reinterpret_cast<const DigestHeader*>(digest);
}

/// Asks for digest b, if there is one.
inline void AskFor(const DigestEstimates& t, int b) {
  if (b >= t.count) return;
  for (int64_t byte = 0; byte < t.ask; byte += 64) _mm_prefetch(t.digests[b] + byte, _MM_HINT_T1);
  if (t.ask > 0) _mm_prefetch(t.digests[b] + t.ask - 1, _MM_HINT_T1);
}

/// Copies digests to where tiles find them.
inline void CopyDigests(const DigestEstimates& t, int first, int count, Memory* m) {
  for (int i = 0; i < count; ++i) {
    const auto* centers = reinterpret_cast<const std::byte*>(&HeaderOf(t.digests[first + i]) + 1);
    for (int s = 0; s < m->ends[2]; ++s) {
      const Step& step = m->steps[s];
      _mm512_store_si512(m->centers[i] + kInts * s, _mm512_maskz_loadu_epi8(step.mask, centers + step.begin));
      if (t.share == 0) continue;
      _mm512_store_si512(m->radii[i] + kInts * s,
                         _mm512_maskz_loadu_epi8(step.mask, centers + t.key_dim + step.begin));
    }
  }
}

/// Products of 32 digests with a group's part. Queries of several groups come from the second-level cache and
/// would push the digests out of the first: their loads say so.
template <bool kSeveral>
inline void Multiply(const DigestEstimates& t, int group, int part, Memory* m) {
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
inline void AddPart(const DigestEstimates& t, int first, int count, int group, int part, const Memory& m,
                    float* scores) {
  const V scales = Load(m.scales[group][part]), reaches = Load(m.reaches[group][part]),
          norms = Load(m.norms[group][part]);
  for (int i = 0; i < count; ++i, scores += kScoreGroup) {
    const DigestHeader& header = HeaderOf(t.digests[first + i]);
    const __m512i fine =
        _mm512_add_epi32(_mm512_slli_epi32(LoadInts(m.products[0][i]), 7), LoadInts(m.products[1][i]));
    V x = Mul(Mul(ToFloats(fine), scales), Set(header.center_scale[part]));
    if constexpr (kAdd) x = Add(Load(scores), x);
    if (t.share != 0) {
      const V box = Mul(Mul(ToFloats(LoadInts(m.products[2][i])), reaches), Set(header.radius_scale[part]));
      x = Add(x, Min(Mul(norms, Set(header.ball[part])), box));
    }
    Store(scores, x);
  }
}

template <bool kSeveral>
inline void Run(const DigestEstimates& t) {
  Memory m;
  const int groups = (t.rows + kScoreGroup - 1) / kScoreGroup;
  for (int b = 0; b < kDigests; ++b) AskFor(t, b);
  FindSteps(t, &m);
  for (int group = 0; group < groups; ++group) PackQueries(t, group, &m);
  Configure({16, 16, 16, 16, 16, 16, 16, 16});
  for (int first = 0; first < t.count; first += kDigests) {
    const int count = t.count - first < kDigests ? t.count - first : kDigests;
    CopyDigests(t, first, count, &m);
    for (int group = 0; group < groups; ++group) {
      // The next digests, a few among each group's products: all at once would only wait for each other.
      for (int i = kDigests * group / groups; i < kDigests * (group + 1) / groups; ++i) {
        AskFor(t, first + kDigests + i);
      }
      float* scores = t.scores + (group * t.stride + first) * kScoreGroup;
      Multiply<kSeveral>(t, group, 0, &m);
      AddPart<false>(t, first, count, group, 0, m, scores);
      if (m.ends[1] == m.ends[2]) continue;
      Multiply<kSeveral>(t, group, 1, &m);
      AddPart<true>(t, first, count, group, 1, m, scores);
    }
  }
  _tile_release();
}

}  // namespace

void DigestEstimatesAmx(const DigestEstimates& t) {
  if ((t.key_split + kInts - 1) / kInts + (t.key_dim - t.key_split + kInts - 1) / kInts > kMostSteps) {
    return DigestEstimatesAvx512(t);
  }
  if (t.rows <= kScoreGroup) {
    Run<false>(t);
  } else {
    Run<true>(t);
  }
}

}  // namespace moesaic::kernels::cpu
