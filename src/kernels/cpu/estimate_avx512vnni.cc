// Estimates of blocks by their boxes with vpdpbusd, in registers. A group's queries are the lanes, and four
// elements of a summary meet all of them together. With at most 8 queries, four elements meet their high and
// low parts, and eight their magnitudes. The instruction multiplies unsigned by signed, so 128 is added to
// centers and subtracted from radii; sums of the queries compensate.
#include "kernels/cpu/simd_avx512-inl.h"
// Requires the lanes included above:
#include "kernels/cpu/estimate_i8-inl.h"
#include "kernels/cpu/vnni-inl.h"

namespace moesaic::kernels::cpu {
namespace {

constexpr int kTogether = 8;  // summaries processed together: up to three sums of each in registers
constexpr int kAhead = 32;    // prefetch distance in summaries

/// Prefetches the lines of up to kAhead summaries, a few at a time between the products. Processors drop most
/// of many simultaneous prefetches (Zen 5), so the hint `prefetch_bytes` is ignored: a head's summaries are
/// prefetched just before they are used.
class Prefetcher {
 public:
  /// Distributes all prefetches over `slots` calls of Prefetch; fewer remain at the end.
  Prefetcher(const std::byte* const* summaries, int count, int64_t bytes, int slots)
      : summaries_(summaries), bytes_(bytes), left_(count < kAhead ? count : kAhead) {
    const auto lines = static_cast<int>(left_ * (bytes_ / 64 + 1));
    each_ = (lines + slots - 1) / slots;
  }
  void Prefetch() {
    if (left_ == 0) return;
    for (int i = 0; i < each_ && left_ > 0; ++i) {
      _mm_prefetch(*summaries_ + at_, _MM_HINT_T1);
      at_ += 64;
      if (at_ < bytes_) continue;
      _mm_prefetch(*summaries_ + bytes_ - 1, _MM_HINT_T1);
      at_ = 0;
      ++summaries_, --left_;
    }
  }

 private:
  const std::byte* const* summaries_;
  int64_t bytes_, at_ = 0;
  int left_, each_;
};

struct Memory : Queries {
  // Initial values of the sums of products, because centers have 128 added and radii 128 subtracted.
  alignas(64) int32_t begins[kMaxGroups][2][3][kScoreGroup];
  // Summaries processed together: centers, then radii.
  alignas(64) std::byte summaries[kMaxSteps][kTogether][2 * kInts];
  const KeySummaryHeader* headers[kTogether];
};

/// Computes the sums of a group's queries, in their lanes.
template <bool kSpread, bool kHalves>
inline void FindBegins(int group, Memory* m) {
  const __m512i ones = _mm512_set1_epi8(1);
  for (int part = 0; part < 2; ++part) {
    __m512i high = _mm512_setzero_si512(), low = high, size = high;
    for (int s = m->ends[part]; s < m->ends[part + 1]; ++s) {
      for (int four = 0; four < kScoreGroup; ++four) {
        Dot(high, ones, LoadBytes(m->queries[group][s][0] + 64 * four));
        if constexpr (!kHalves) Dot(low, ones, LoadBytes(m->queries[group][s][1] + 64 * four));
        if (!kSpread || (kHalves && four >= kScoreGroup / 2)) continue;
        Dot(size, LoadBytes(m->queries[group][s][2] + 64 * four), ones);
      }
    }
    auto* begins = m->begins[group][part];
    StoreInts(begins[0], _mm512_sub_epi32(_mm512_setzero_si512(), ShiftLeft<7>(high)));
    StoreInts(begins[1], _mm512_sub_epi32(_mm512_setzero_si512(), ShiftLeft<7>(low)));
    StoreInts(begins[2], ShiftLeft<7>(size));
  }
}

/// Copies up to kTogether summaries from `first` on to the layout of the products: with the other signedness,
/// and the data of one step adjacent.
template <bool kSpread>
inline void CopySummaries(const KeySummaryEstimates& t, int first, Memory* m) {
  const __m512i top = _mm512_set1_epi8(-128);
  for (int i = 0; i < kTogether; ++i) {
    const std::byte* summary = t.summaries[first + i < t.count ? first + i : first];
    m->headers[i] = reinterpret_cast<const KeySummaryHeader*>(summary);
    for (int s = 0; s < m->ends[2]; ++s) {
      const Step& step = m->steps[s];
      const std::byte* centers = summary + sizeof(KeySummaryHeader) + step.begin;
      const auto store = [&](const std::byte* from, std::byte* to) {
        _mm512_store_si512(to, _mm512_xor_si512(_mm512_maskz_loadu_epi8(step.mask, from), top));
      };
      store(centers, m->summaries[s][i]);
      if constexpr (kSpread) store(centers + t.key_dim, m->summaries[s][i] + kInts);
    }
  }
}

/// Adds scores [count][16] of a group. kHalves as in PackQueries.
template <bool kSpread, bool kHalves, bool kAdd>
inline void ScorePart(const Memory& m, int group, int part, int count, Prefetcher* prefetcher,
                      float* scores) {
  const auto* begins = m.begins[group][part];
  __m512i high[kTogether], low[kTogether], size[kTogether];
#pragma GCC unroll 8
  for (int i = 0; i < kTogether; ++i) {
    high[i] = LoadInts(begins[0]);
    low[i] = LoadInts(begins[1]);
    size[i] = LoadInts(begins[2]);
  }
  for (int s = m.ends[part]; s < m.ends[part + 1]; ++s) {
    const std::byte *q = m.queries[group][s][0], *sizes = m.queries[group][s][2];
    const std::byte* summaries = m.summaries[s][0];
    const std::byte* end = summaries + __builtin_popcountll(m.steps[s].mask);
    for (; summaries < end; summaries += 8, q += 128, sizes += kHalves ? 64 : 128) {
      prefetcher->Prefetch();
#pragma GCC unroll 2
      for (int four = 0; four < 2; ++four) {
        const __m512i q_high = LoadBytes(q + 64 * four);
        const __m512i q_low = kHalves ? q_high : LoadBytes(q + 64 * four + kStepBytes);
        const __m512i q_size = kSpread ? LoadBytes(sizes + (kHalves ? 0 : 64 * four)) : q_high;
#pragma GCC unroll 8
        for (int i = 0; i < kTogether; ++i) {
          const std::byte* at = summaries + 2 * kInts * i + 4 * four;
          const __m512i centers = Four(at);
          Dot(high[i], centers, q_high);
          if constexpr (!kHalves) Dot(low[i], centers, q_low);
          if constexpr (kSpread && kHalves) {
            if (four == 0) Dot(size[i], q_size, Eight(at + kInts));
          } else if constexpr (kSpread) {
            DotFour(size[i], q_size, at + kInts);
          }
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kTogether; ++i) {
    if (i >= count) break;
    if constexpr (kHalves) {
      low[i] = _mm512_shuffle_i64x2(high[i], high[i], 0x4e);
      const __m512i both = _mm512_add_epi32(size[i], _mm512_srli_epi64(size[i], 32));
      size[i] = _mm512_zextsi256_si512(_mm512_cvtepi64_epi32(both));
    }
    AddPart<kSpread, kAdd>(*m.headers[i], group, part, m, high[i], low[i], size[i], scores + i * kScoreGroup);
  }
}

template <bool kSpread, bool kHalves>
inline void Run(const KeySummaryEstimates& t) {
  Memory m;
  const int groups = (t.rows + kScoreGroup - 1) / kScoreGroup;
  const int slots = kAhead / kTogether * groups * t.key_dim / 8;
  const int64_t bytes = BoxBytes(t.key_dim) - (kSpread ? 0 : t.key_dim);
  FindSteps(t, &m);
  for (int group = 0; group < groups; ++group) {
    PackQueries<kHalves>(t, group, &m);
    FindBegins<kSpread, kHalves>(group, &m);
  }
  for (int ahead = kAhead; ahead < t.count + kAhead; ahead += kAhead) {
    Prefetcher prefetcher = ahead < t.count ? Prefetcher(t.summaries + ahead, t.count - ahead, bytes, slots)
                                            : Prefetcher(t.next, t.next_count, bytes, slots);
    for (int first = ahead - kAhead; first < t.count && first < ahead; first += kTogether) {
      const int count = t.count - first < kTogether ? t.count - first : kTogether;
      CopySummaries<kSpread>(t, first, &m);
      for (int group = 0; group < groups; ++group) {
        float* scores = t.scores + (group * t.stride + first) * kScoreGroup;
        ScorePart<kSpread, kHalves, false>(m, group, 0, count, &prefetcher, scores);
        if (m.ends[1] == m.ends[2]) continue;
        ScorePart<kSpread, kHalves, true>(m, group, 1, count, &prefetcher, scores);
      }
    }
  }
}

}  // namespace

void KeySummaryEstimatesAvx512Vnni(const KeySummaryEstimates& t) {
  const bool halves = t.rows <= kScoreGroup / 2;
  if (t.share == 0) {
    halves ? Run<false, true>(t) : Run<false, false>(t);
  } else {
    halves ? Run<true, true>(t) : Run<true, false>(t);
  }
}

}  // namespace moesaic::kernels::cpu
