// Estimates of blocks by their boxes with vpdpbusd, in registers: a group's queries are the lanes, and four
// elements of a digest, as they stand in memory, meet all of them at once. The instruction takes unsigned by
// signed, so that queries have 128 added and their magnitudes 128 taken away, which sums of the digests undo.
#include "kernels/cpu/simd_avx512-inl.h"
// After the lanes:
#include "kernels/cpu/estimate_i8-inl.h"
#include "kernels/cpu/vnni-inl.h"

namespace moesaic::kernels::cpu {
namespace {

constexpr int kTogether = 8;  // digests: up to three sums of each in registers
constexpr int kAhead = 32;    // digests: what is asked for is so far ahead

/// Asks for the lines of up to kAhead digests, a few at a time among the products. A processor that is asked
/// for many at once drops most of them (Zen 5), and so `ask` is not heeded: a head's digests are asked for
/// just before its turn.
class Asker {
 public:
  /// All are asked for within `slots` calls of Ask.
  Asker(const std::byte* const* digests, int count, int64_t bytes, int slots)
      : digests_(digests), bytes_(bytes), left_(count < kAhead ? count : kAhead) {
    const auto lines = static_cast<int>(left_ * (bytes_ / 64 + 1));
    each_ = (lines + slots - 1) / slots;
  }
  void Ask() {
    for (int i = 0; i < each_ && left_ > 0; ++i) {
      _mm_prefetch(*digests_ + at_, _MM_HINT_T0);
      at_ += 64;
      if (at_ < bytes_) continue;
      _mm_prefetch(*digests_ + bytes_ - 1, _MM_HINT_T0);
      at_ = 0;
      ++digests_, --left_;
    }
  }

 private:
  const std::byte* const* digests_;
  int64_t bytes_, at_ = 0;
  int left_, each_;
};

/// Digests that are scored together: their centers, behind which radii stand, and sums of both, by part.
struct Together {
  const std::byte* centers[kTogether];
  alignas(64) int32_t sums[2][2 * kTogether];
};

template <bool kSpread>
inline void Sum(const DigestEstimates& t, const Queries& m, int part, Together* d) {
  const __m512i ones = _mm512_set1_epi8(1);
  V sums[2 * kTogether];
#pragma GCC unroll 8
  for (int i = 0; i < kTogether; ++i) {
    __m512i center = _mm512_setzero_si512(), radius = center;
    for (int s = m.ends[part]; s < m.ends[part + 1]; ++s) {
      const Step& step = m.steps[s];
      const std::byte* at = d->centers[i] + step.begin;
      Dot(center, ones, _mm512_maskz_loadu_epi8(step.mask, at));
      if constexpr (kSpread) Dot(radius, _mm512_maskz_loadu_epi8(step.mask, at + t.key_dim), ones);
    }
    sums[i] = ToFloats(center);  // below 2^24: exact
    sums[kTogether + i] = ToFloats(radius);
  }
  StoreInts(d->sums[part], ToInts(SumEach(sums)));
}

/// Adds scores [count][16] of a group. kHalves as PackQueries has it.
template <bool kSpread, bool kHalves, bool kAdd>
inline void ScorePart(const DigestEstimates& t, const Queries& m, int group, int part, const Together& d,
                      int count, Asker* asker, float* scores) {
  __m512i high[kTogether], low[kTogether], size[kTogether];
#pragma GCC unroll 8
  for (int i = 0; i < kTogether; ++i) high[i] = low[i] = size[i] = _mm512_setzero_si512();
  for (int s = m.ends[part]; s < m.ends[part + 1]; ++s) {
    const auto* queries = m.queries[group][s];
    const int fours = __builtin_popcountll(m.steps[s].mask) / 4;
    for (int four = 0, at = m.steps[s].begin; four < fours; ++four, at += 4) {
      asker->Ask();
      const __m512i q_high = LoadBytes(queries[0] + 64 * four);
      const __m512i q_low = kHalves ? q_high : LoadBytes(queries[1] + 64 * four);
      const __m512i q_size = kSpread ? LoadBytes(queries[2] + 64 * four) : q_high;
#pragma GCC unroll 8
      for (int i = 0; i < kTogether; ++i) {
        const std::byte* center = d.centers[i] + at;
        if constexpr (kHalves) {
          DotFour(high[i], q_high, center);
        } else {
          const __m512i four_centers = Four(center);
          Dot(high[i], q_high, four_centers);
          Dot(low[i], q_low, four_centers);
        }
        if constexpr (kSpread) Dot(size[i], Four(center + t.key_dim), q_size);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kTogether; ++i) {
    if (i >= count) break;
    if constexpr (kHalves) low[i] = _mm512_shuffle_i64x2(high[i], high[i], 0x4e);
    const __m512i centers = _mm512_set1_epi32(128 * d.sums[part][i]);
    const __m512i radii = _mm512_set1_epi32(128 * d.sums[part][kTogether + i]);
    const auto& header = *reinterpret_cast<const DigestHeader*>(d.centers[i] - sizeof(DigestHeader));
    AddPart<kSpread, kAdd>(header, group, part, m, _mm512_sub_epi32(high[i], centers),
                           _mm512_sub_epi32(low[i], centers), _mm512_add_epi32(size[i], radii),
                           scores + i * kScoreGroup);
  }
}

template <bool kSpread, bool kHalves>
inline void Run(const DigestEstimates& t) {
  Queries m;
  Together d;
  const int groups = (t.rows + kScoreGroup - 1) / kScoreGroup;
  const int slots = kAhead / kTogether * groups * t.key_dim / 4;
  const int64_t bytes = BoxBytes(t.key_dim) - (kSpread ? 0 : t.key_dim);
  FindSteps(t, &m);
  for (int group = 0; group < groups; ++group) PackQueries</*kOffset=*/true, kHalves>(t, group, &m);
  for (int ahead = kAhead; ahead < t.count + kAhead; ahead += kAhead) {
    Asker asker = ahead < t.count ? Asker(t.digests + ahead, t.count - ahead, bytes, slots)
                                  : Asker(t.after, t.after_count, bytes, slots);
    for (int first = ahead - kAhead; first < t.count && first < ahead; first += kTogether) {
      const int count = t.count - first < kTogether ? t.count - first : kTogether;
      for (int i = 0; i < kTogether; ++i) {
        d.centers[i] = t.digests[first + (i < count ? i : 0)] + sizeof(DigestHeader);
      }
      const bool two = m.ends[1] < m.ends[2];
      Sum<kSpread>(t, m, 0, &d);
      if (two) Sum<kSpread>(t, m, 1, &d);
      for (int group = 0; group < groups; ++group) {
        float* scores = t.scores + (group * t.stride + first) * kScoreGroup;
        ScorePart<kSpread, kHalves, false>(t, m, group, 0, d, count, &asker, scores);
        if (two) ScorePart<kSpread, kHalves, true>(t, m, group, 1, d, count, &asker, scores);
      }
    }
  }
}

}  // namespace

void DigestEstimatesAvx512Vnni(const DigestEstimates& t) {
  const bool halves = t.rows <= kScoreGroup / 2;
  if (t.share == 0) {
    halves ? Run<false, true>(t) : Run<false, false>(t);
  } else {
    halves ? Run<true, true>(t) : Run<true, false>(t);
  }
}

}  // namespace moesaic::kernels::cpu
