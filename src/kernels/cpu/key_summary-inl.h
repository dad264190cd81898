// Micro-kernels of key summaries over the lanes of simd_<isa>-inl.h, which must be included first.
#pragma once

#include "kernels/cpu/key_summary_round-inl.h"
#include "kernels/micro_kernels.h"

namespace moesaic::kernels {
namespace {

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
    for (int j = 0; j < kBlockKeys; ++j, key += stride) {
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
  for (int j = 0; j < kBlockKeys; ++j, key += stride) {
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
inline void MakeKeySummary(const KeySummaryTask& t) {
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
    MakeKeySummary<float>(task);
  } else if (task.kv_dtype == tensor::DType::kI8) {
    MakeKeySummary<int8_t>(task);
  } else {
    MakeKeySummary<uint16_t>(task);
  }
}

}  // namespace
}  // namespace moesaic::kernels
