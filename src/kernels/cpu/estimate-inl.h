// Estimates for block selection, over the lanes of simd_<isa>-inl.h, which must be included first.
#pragma once

#include "kernels/cpu/key_summary-inl.h"
#include "kernels/micro_kernels.h"

namespace moesaic::kernels {
namespace {

/// Rows of a group: their products with centers and with radii fill one register after the final sums.
constexpr int kScoreRows = kLanes / 2;

/// Loads rows [first, first + kScoreRows), scaled, with zeros for missing rows, and the norms of their parts.
inline void LoadRows(const KeySummaryEstimates& t, int first, float (*q)[kMaxKeySummaryDim], float* norms) {
  const int ends[3] = {0, t.key_split, t.key_dim};
  for (int i = 0; i < kScoreRows; ++i) {
    for (int part = 0; part < 2; ++part) {
      V squares = Zero();
      for (int d = ends[part]; d < ends[part + 1]; d += kLanes) {
        V x = Zero();
        if (first + i < t.rows) {
          x = Mul(LoadUpTo(t.q + (first + i) * t.q_stride, d, ends[part + 1]), Set(t.scale));
        }
        StoreUpTo(q[i], d, ends[part + 1], x);
        squares = Fma(x, x, squares);
      }
      norms[2 * i + part] = __builtin_sqrtf(SumLanes(squares));
    }
  }
}

/// Lanes: the products of the group's rows with the centers of dimensions [begin, end), then with the radii.
inline V PartScores(const float (*q)[kMaxKeySummaryDim], const int8_t* centers, const uint8_t* radii,
                    int begin, int end) {
  V sum[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) sum[i] = Zero();
  for (int d = begin; d < end; d += kLanes) {
    const V center = LoadUpTo(centers, d, end), radius = LoadUpTo(radii, d, end);
#pragma GCC unroll 8
    for (int i = 0; i < kScoreRows; ++i) {
      const V x = LoadUpTo(q[i], d, end);
      sum[i] = Fma(x, center, sum[i]);
      sum[kScoreRows + i] = Fma(Abs(x), radius, sum[kScoreRows + i]);
    }
  }
  return SumEach(sum);
}

/// Estimates the scores of a group's rows in all blocks. `scores` is that of its first row in block 0.
inline void EstimateGroup(const KeySummaryEstimates& t, const float (*q)[kMaxKeySummaryDim],
                          const float* norms, float* scores) {
  const int ends[3] = {0, t.key_split, t.key_dim};
  // Lanes of centers have no bound, which a ball of radius 0 and this value express.
  alignas(64) float bound[2][kLanes], open[kLanes], scales[kLanes], out[kLanes];
  for (int i = 0; i < kScoreRows; ++i) {
    for (int part = 0; part < 2; ++part) {
      bound[part][i] = 0;
      bound[part][kScoreRows + i] = norms[2 * i + part];
    }
    open[i] = __builtin_inff();
    open[kScoreRows + i] = 0;
  }
  for (int b = 0; b < t.count; ++b, scores += kScoreGroup) {
    const auto* header = reinterpret_cast<const KeySummaryHeader*>(t.summaries[b]);
    const auto* centers = reinterpret_cast<const int8_t*>(header + 1);
    const auto* radii = reinterpret_cast<const uint8_t*>(centers + t.key_dim);
    if (b + 1 < t.count) {
      const auto* next = reinterpret_cast<const char*>(t.summaries[b + 1]);
      for (int64_t byte = 0; byte < BoxBytes(t.key_dim); byte += 64) __builtin_prefetch(next + byte, 0, 3);
    }
    V total = Zero();
    for (int part = 0; part < 2; ++part) {
      if (ends[part] == ends[part + 1]) continue;
      for (int i = 0; i < kScoreRows; ++i) {
        scales[i] = header->center_scale[part];
        scales[kScoreRows + i] = header->radius_scale[part];
      }
      const V scaled = Mul(PartScores(q, centers, radii, ends[part], ends[part + 1]), Load(scales));
      total = Add(total, Min(Fma(Load(bound[part]), Set(header->ball[part]), Load(open)), scaled));
    }
    Store(out, total);
    for (int i = 0; i < kScoreRows; ++i) {
      scores[i] = t.share == 0 ? out[i] : out[i] + t.share * out[kScoreRows + i];
    }
  }
}

inline void RunKeySummaryEstimates(const KeySummaryEstimates& t) {
  alignas(64) float q[kScoreRows][kMaxKeySummaryDim], norms[2 * kScoreRows];
  const int padded = (t.rows + kScoreGroup - 1) / kScoreGroup * kScoreGroup;
  for (int first = 0; first < padded; first += kScoreRows) {
    LoadRows(t, first, q, norms);
    EstimateGroup(t, q, norms, t.scores + first / kScoreGroup * t.stride * kScoreGroup + first % kScoreGroup);
  }
}

/// Partial maxima and sums: enough to hide an addition's latency.
constexpr int kPartial = 4;

inline void RunBlockShares(float* scores, int rows, int blocks, float* shares) {
  for (int b = 0; b < blocks; ++b) shares[b] = (scores[b * kScoreGroup] - scores[b * kScoreGroup]) * 0;
  for (int first = 0; first < rows; first += kLanes) {
    float* x = scores + first;
    V most[kPartial], sum[kPartial];
    for (int i = 0; i < kPartial; ++i) most[i] = Set(-__builtin_inff()), sum[i] = Zero();
    int b = 0;
    for (; b + kPartial <= blocks; b += kPartial) {
#pragma GCC unroll 4
      for (int i = 0; i < kPartial; ++i) most[i] = Max(Load(x + (b + i) * kScoreGroup), most[i]);
    }
    for (; b < blocks; ++b) most[0] = Max(Load(x + b * kScoreGroup), most[0]);
    const V largest = Max(Max(most[0], most[1]), Max(most[2], most[3]));
    const auto share = [&](int block, V* total) {
      // Max returns the second operand for NaN, which is below the range of normal results.
      const V power = Max(Sub(Load(x + block * kScoreGroup), largest), Set(-200.0F));
      const V e = SelectNegative(Sub(power, Set(kMinPower)), Zero(), Exp(Min(power, Zero())));
      Store(x + block * kScoreGroup, e);
      *total = Add(*total, e);
    };
    for (b = 0; b + kPartial <= blocks; b += kPartial) {
#pragma GCC unroll 4
      for (int i = 0; i < kPartial; ++i) share(b + i, &sum[i]);
    }
    for (; b < blocks; ++b) share(b, &sum[0]);
    alignas(64) float sums[kLanes], inverses[kLanes];
    const V all = Add(Add(sum[0], sum[1]), Add(sum[2], sum[3]));
    Store(sums, all);
    Store(inverses, Div(Set(1.0F), all));
    for (int i = 0; i < kLanes; ++i) inverses[i] = first + i < rows && sums[i] > 0 ? inverses[i] : 0;
    const V inverse = Load(inverses);
    alignas(64) float sums_of_blocks[kLanes];
    for (b = 0; b < blocks; b += kLanes) {
      const int some = blocks - b < kLanes ? blocks - b : kLanes;
      V of_block[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        of_block[i] = i < some ? Mul(Load(x + (b + i) * kScoreGroup), inverse) : Zero();
      }
      Store(sums_of_blocks, SumEach(of_block));
      for (int i = 0; i < some; ++i) shares[b + i] += sums_of_blocks[i];
    }
  }
}

}  // namespace
}  // namespace moesaic::kernels
