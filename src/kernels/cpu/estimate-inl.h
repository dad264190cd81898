// Estimates for block selection, over the lanes of simd_<isa>-inl.h, which must be included first.
#pragma once

#include "kernels/cpu/key_summary-inl.h"
#include "kernels/micro_kernels.h"

namespace moesaic::kernels {
namespace {

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

inline void RunKeySummaryEstimates(const KeySummaryEstimates& t) {
  alignas(64) float q[kScoreRows][kMaxKeySummaryDim], norms[2 * kScoreRows];
  alignas(64) float centers[kScoreRows][kScoreSummaries], spreads[kScoreRows][kScoreSummaries];
  KeySummaryScores call = {q[0],      kMaxKeySummaryDim, norms,      t.summaries, kScoreRows,     0,
                           t.key_dim, t.key_split,       centers[0], spreads[0],  kScoreSummaries};
  const int padded = (t.rows + kScoreGroup - 1) / kScoreGroup * kScoreGroup;
  for (int first = 0; first < padded; first += kScoreRows) {
    LoadRows(t, first, q, norms);
    float* scores = t.scores + first / kScoreGroup * t.stride * kScoreGroup + first % kScoreGroup;
    for (int from = 0; from < t.count; from += kScoreSummaries) {
      call.summaries = t.summaries + from;
      call.count = t.count - from < kScoreSummaries ? t.count - from : kScoreSummaries;
      ScoreGroup(call, 0, kScoreRows, 0, call.count);
      for (int b = 0; b < call.count; ++b, scores += kScoreGroup) {
        for (int i = 0; i < kScoreRows; ++i) {
          scores[i] = t.share == 0 ? centers[i][b] : centers[i][b] + t.share * spreads[i][b];
        }
      }
    }
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
