// Micro-kernels of key summaries over the lanes of simd_<isa>-inl.h, which must be included first.
#pragma once

#include "kernels/cpu/key_summary_round-inl.h"
#include "kernels/micro_kernels.h"

namespace moesaic::kernels {
namespace {

constexpr int kDigestKeys = 64;

/// Loads elements from d on, with zeros from `end` on.
template <typename T>
inline V LoadUpTo(const T* p, int d, int end) {
  if constexpr (kLanes > 8) {  // dimensions are multiples of 8
    if (end - d < kLanes) return LoadFirst(p + d, end - d);
  }
  return Load(p + d);
}

inline void StoreUpTo(float* p, int d, int end, V x) {
  if constexpr (kLanes > 8) {
    if (end - d < kLanes) return StoreFirst(p + d, x, end - d);
  }
  Store(p + d, x);
}

/// Computes the box of dimensions [begin, end); elements are multiplied by scales[key] if there are scales. A
/// key that is not finite must give a box that is not finite: x - x is NaN then and is added to both sides.
template <typename T>
inline void FindBox(const KeySummaryTask& t, const float* scales, int begin, int end, Box* box) {
  const int64_t stride = t.key_stride / static_cast<int64_t>(sizeof(T));
  for (int d = begin; d < end; d += kLanes) {
    V low = Set(__builtin_inff()), high = Set(-__builtin_inff()), wrong = Zero();
    const T* key = reinterpret_cast<const T*>(t.keys);
    for (int j = 0; j < kDigestKeys; ++j, key += stride) {
      V x = LoadUpTo(key, d, end);
      if (scales != nullptr) x = Mul(x, Set(scales[j]));
      low = Min(low, x);
      high = Max(high, x);
      wrong = Add(wrong, Sub(x, x));
    }
    StoreUpTo(box->low, d, end, Add(low, wrong));
    StoreUpTo(box->high, d, end, Add(high, wrong));
  }
}

/// Returns the maximum distance of a key from `centers` in dimensions [begin, end).
template <typename T>
inline float FindBall(const KeySummaryTask& t, const float* scales, int begin, int end,
                      const float* centers) {
  const int64_t stride = t.key_stride / static_cast<int64_t>(sizeof(T));
  float most = 0;
  const T* key = reinterpret_cast<const T*>(t.keys);
  for (int j = 0; j < kDigestKeys; ++j, key += stride) {
    V sum = Zero();
    for (int d = begin; d < end; d += kLanes) {
      V x = LoadUpTo(key, d, end);
      if (scales != nullptr) x = Mul(x, Set(scales[j]));
      const V off = Sub(x, LoadUpTo(centers, d, end));
      sum = Fma(off, off, sum);
    }
    const float squares = SumLanes(sum);
    most = squares > most ? squares : most;
  }
  return __builtin_sqrtf(most) * kNormSlack;
}

template <typename T>
inline void MakeDigest(const KeySummaryTask& t) {
  auto* header = reinterpret_cast<KeySummaryHeader*>(t.summary);
  auto* centers = reinterpret_cast<int8_t*>(header + 1);
  auto* radii = reinterpret_cast<uint8_t*>(centers + t.key_dim);
  Box box;
  *header = {};
  const int ends[3] = {0, t.key_split, t.key_dim};
  for (int part = 0; part < 2; ++part) {
    const int begin = ends[part], end = ends[part + 1];
    if (begin == end) continue;
    const float* scales = t.kv_dtype != tensor::DType::kI8 ? nullptr
                          : part == 0                      ? t.key_scales
                                                           : t.rest_scales;
    FindBox<T>(t, scales, begin, end, &box);
    if (!RoundBox(begin, end, part, &box, header, centers, radii)) {
      return InvalidateKeySummary(t.key_dim, header, centers, radii);
    }
    header->ball[part] = FindBall<T>(t, scales, begin, end, box.low);
  }
}

inline void RunKeySummary(const KeySummaryTask& task) {
  if (task.kv_dtype == tensor::DType::kF32) {
    MakeDigest<float>(task);
  } else if (task.kv_dtype == tensor::DType::kI8) {
    MakeDigest<int8_t>(task);
  } else {
    MakeDigest<uint16_t>(task);
  }
}

/// Rows of a group: their products with centers and with radii fill one register after the final sums.
constexpr int kScoreRows = kLanes / 2;

/// Lanes: the products of the group's rows with the centers of dimensions [begin, end), then with the radii.
inline V PartScores(const float* q, int64_t q_stride, const int8_t* centers, const uint8_t* radii, int begin,
                    int end) {
  V sum[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) sum[i] = Zero();
  for (int d = begin; d < end; d += kLanes) {
    const V center = LoadUpTo(centers, d, end), radius = LoadUpTo(radii, d, end);
#pragma GCC unroll 8
    for (int i = 0; i < kScoreRows; ++i) {
      const V x = LoadUpTo(q + i * q_stride, d, end);
      sum[i] = Fma(x, center, sum[i]);
      sum[kScoreRows + i] = Fma(Abs(x), radius, sum[kScoreRows + i]);
    }
  }
  return SumEach(sum);
}

inline void ScoreGroup(const KeySummaryScores& t, int first, int rows, int from, int to) {
  const float* q = t.q + first * t.q_stride;
  const int ends[3] = {0, t.key_split, t.key_dim};
  // Lanes of centers have no bound, which a ball of radius 0 and this value express.
  alignas(64) float bound[2][kLanes], open[kLanes], scales[kLanes], out[kLanes];
  for (int i = 0; i < kScoreRows; ++i) {
    for (int part = 0; part < 2; ++part) {
      bound[part][i] = 0;
      bound[part][kScoreRows + i] = t.q_norms[2 * (first + i) + part];
    }
    open[i] = __builtin_inff();
    open[kScoreRows + i] = 0;
  }
  for (int b = from; b < to; ++b) {
    const auto* header = reinterpret_cast<const KeySummaryHeader*>(t.summaries[b]);
    const auto* centers = reinterpret_cast<const int8_t*>(header + 1);
    const auto* radii = reinterpret_cast<const uint8_t*>(centers + t.key_dim);
    if (first == 0 && b + 1 < to) {
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
      const V scaled =
          Mul(PartScores(q, t.q_stride, centers, radii, ends[part], ends[part + 1]), Load(scales));
      total = Add(total, Min(Fma(Load(bound[part]), Set(header->ball[part]), Load(open)), scaled));
    }
    Store(out, total);
    for (int i = 0; i < rows; ++i) {
      t.centers[(first + i) * t.stride + b] = out[i];
      t.spreads[(first + i) * t.stride + b] = out[kScoreRows + i];
    }
  }
}

/// Summaries that all rows process before the next ones: 16 of 288 or 1184 bytes stay in an L1 cache.
constexpr int kScoreSummaries = 16;

inline void RunKeySummaryScores(const KeySummaryScores& scores) {
  for (int from = 0; from < scores.count; from += kScoreSummaries) {
    const int to = scores.count - from < kScoreSummaries ? scores.count : from + kScoreSummaries;
    for (int first = 0; first < scores.rows; first += kScoreRows) {
      const int left = scores.rows - first;
      ScoreGroup(scores, first, left < kScoreRows ? left : kScoreRows, from, to);
    }
  }
}

inline float RunExpSum(const float* x, const float* y, float spread, float shift, int n, float* out) {
  V sum = Zero();
  for (int i = 0; i < n; i += kLanes) {
    const bool tail = n - i < kLanes;
    const V a = tail ? LoadFirst(x + i, n - i) : Load(x + i);
    const V b = tail ? LoadFirst(y + i, n - i) : Load(y + i);
    const V power = Sub(Fma(Set(spread), b, a), Set(shift));
    // Max returns the second operand for NaN, which is below the range of normal results.
    V e = Exp(Min(Max(power, Set(-200.0F)), Set(80.0F)));
    if (tail) {
      StoreFirst(out + i, e, n - i);
      e = LoadFirst(out + i, n - i);
    } else {
      Store(out + i, e);
    }
    sum = Add(sum, e);
  }
  return SumLanes(sum);
}

}  // namespace
}  // namespace moesaic::kernels
