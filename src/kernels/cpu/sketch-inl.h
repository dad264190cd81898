// Shared by the micro-kernels of sketches, over the lanes of simd_<isa>-inl.h, which must be included first.
#pragma once

#include "kernels/cpu/exp_constants.h"
#include "kernels/micro_kernels.h"

namespace moesaic::kernels {
namespace {

constexpr int kSketchRows = 16;  // rows processed together
constexpr int kStepBytes =
    4096;  // bytes of a step's signs, one byte per sign: [4 groups][16 quads of dimensions][16 keys][4]
// Maximum steps of 64 signs: a second part begins with its own step, and a part of at most 64 dimensions has
// two planes.
constexpr int kMaxSteps = kMaxKeySummaryDim / 64 + 2;

/// Expands the sixteen rows of one group and step to bytes: 2 for plus, otherwise 0.
inline void WidenSigns(const std::byte* bits, std::byte* rows) {
  constexpr int kBytes = 4 * kLanes;
  const VI two = SetBytes(2);
  for (int half = 0; half < 2; ++half) {
    for (int at = 0; at < 64; at += kBytes) {
      const VI x = LoadBytes(bits + 64 * half + at);
      std::byte* to = rows + 512 * half + at;
      StoreBytes(to, And(AddShorts(x, x), two));
      StoreBytes(to + 64, And(x, two));
      StoreBytes(to + 128, And(ShiftShortsRight<1>(x), two));
      StoreBytes(to + 192, And(ShiftShortsRight<2>(x), two));
      StoreBytes(to + 256, And(ShiftShortsRight<3>(x), two));
      StoreBytes(to + 320, And(ShiftShortsRight<4>(x), two));
      StoreBytes(to + 384, And(ShiftShortsRight<5>(x), two));
      StoreBytes(to + 448, And(ShiftShortsRight<6>(x), two));
    }
  }
}

inline void WidenSketches(const SketchLayout& layout, const std::byte* summary, std::byte* signs) {
  const int groups = (layout.width[0] + layout.width[1]) / 64 * 4;
  for (int i = 0; i < groups; ++i) {
    WidenSigns(summary + layout.planes + int64_t{128} * i, signs + int64_t{1024} * i);
  }
}

/// Prefetch distance in blocks. Sketches have a kilobyte or more and are stored by block number, which need
/// not follow the sequence. Data prefetched this many blocks ahead is in the L2 cache in time.
constexpr int kAhead = 2;

inline void PrefetchSketches(const SketchLayout& layout, const std::byte* summary) {
  const auto* at = reinterpret_cast<const char*>(summary);
  for (int64_t byte = layout.factors; byte < layout.bytes; byte += 64) __builtin_prefetch(at + byte, 0, 2);
}
inline void PrefetchFirst(const SketchScores& t) {
  for (int b = 0; b < kAhead && b < t.count; ++b) PrefetchSketches(t.layout, t.summaries[b]);
}

/// The factors of a block's keys.
struct Factors {
  V of[2][kBlockKeys / kLanes];
};
inline void LoadFactors(const SketchLayout& layout, const std::byte* summary, Factors* factors) {
  const auto* header = reinterpret_cast<const KeySummaryHeader*>(summary);
  const auto* from = reinterpret_cast<const uint8_t*>(summary + layout.factors);
  for (int part = 0; part < (layout.width[1] > 0 ? 2 : 1); ++part) {
    for (int i = 0; i < kBlockKeys / kLanes; ++i) {
      factors->of[part][i] = Mul(Load(from + part * kBlockKeys + i * kLanes), Set(header->sketch[part]));
    }
  }
}

/// Approximates a power of two by interpreting a number as the power's bits: 2^23 per power, starting at that
/// of 1. Between powers this is linear, at most 0.0861 of a power above the logarithm. The logarithm of a sum
/// is taken by the inverse line and has at most the same error: 0.06 in natural logarithms.
constexpr float kPower = 8388608, kOne = 127 * kPower;

/// For each lane, sums the exponentials of the products of 64 keys with a row; the caller adds up the lanes.
inline V ExpOfProducts(const int32_t* products, const int32_t* rest, const Factors& factors,
                       const float* scales) {
  const V first = Set(scales[0] * (kLog2E * kPower)), second = Set(scales[1] * (kLog2E * kPower));
  V sum = Zero();
#pragma GCC unroll 8
  for (int i = 0; i < kBlockKeys / kLanes; ++i) {
    V x = Fma(Mul(ToFloats(LoadInts(products + i * kLanes)), factors.of[0][i]), first, Set(kOne));
    if (rest != nullptr) {
      x = Fma(Mul(ToFloats(LoadInts(rest + i * kLanes)), factors.of[1][i]), second, x);
    }
    x = Min(Max(x, Set(kOne - 100 * kPower)), Set(kOne + 100 * kPower));
    sum = Add(sum, AsFloats(ToInts(x)));
  }
  return sum;
}

/// Adds to the scores of block b, for up to 16 rows from `first` on, the logarithms of their sums over its
/// keys. products [16][64]: the rows' products with the signs of the keys' first part; rest: those with the
/// second part, if any.
inline void AddLogarithms(const SketchScores& t, int first, int b, const int32_t (*products)[kBlockKeys],
                          const int32_t (*rest)[kBlockKeys], const Factors& factors) {
  constexpr float kLn2 = 0.693147181F;
  const int rows = t.rows - first < kSketchRows ? t.rows - first : kSketchRows;
  for (int from = 0; from < rows; from += kLanes) {
    V sums[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      const int row = from + i;
      sums[i] = row < rows ? ExpOfProducts(products[row], t.layout.width[1] > 0 ? rest[row] : nullptr,
                                           factors, t.q_scales + 2 * (first + row))
                           : Zero();
    }
    const V power = Mul(Sub(ToFloats(AsInts(SumEach(sums))), Set(kOne)), Set(kLn2 / kPower));
    float* scores = t.scores + (first / kScoreGroup * t.stride + b) * kScoreGroup + from;
    Store(scores, Add(Load(scores), power));
  }
}

/// Multiplies 16 rows by a part's signs, without tiles. 16-bit sums hold 16 quads: 16 * 2 * 2 * 127.
inline void MultiplySigns(const std::byte* signs, int steps, const int8_t* q, int64_t q_stride, int rows,
                          const int32_t* q_sums, int32_t (*products)[kBlockKeys]) {
  const VI ones = SetShorts(1);
  for (int row = 0; row < rows; ++row) {
    const int8_t* x = q + row * q_stride;
    for (int key = 0; key < kBlockKeys; key += kLanes) {
      VI total = SetInts(-q_sums[2 * row]);
      for (int step = 0; step < steps; ++step) {
        const std::byte* at = signs + int64_t{kStepBytes} * step + key / 16 * 1024 + key % 16 * 4;
        VI sum = SetInts(0);
#pragma GCC unroll 16
        for (int quad = 0; quad < 16; ++quad) {
          int32_t four;
          __builtin_memcpy(&four, x + 64 * step + 4 * quad, sizeof(four));
          sum = AddShorts(sum, MultiplyBytes(LoadBytes(at + 64 * quad), SetInts(four)));
        }
        total = AddInts(total, MultiplyShorts(sum, ones));
      }
      StoreInts(products[row] + key, total);
    }
  }
}

/// Signature of MultiplySigns, for replacements; rows may be read up to kSketchRows.
using MultiplySignsFn = void (*)(const std::byte* signs, int steps, const int8_t* q, int64_t q_stride,
                                 int rows, const int32_t* q_sums, int32_t (*products)[kBlockKeys]);

template <MultiplySignsFn kMultiply = MultiplySigns>
inline void RunSketchScores(const SketchScores& t) {
  alignas(64) std::byte signs[kMaxSteps * kStepBytes];
  alignas(64) int32_t products[2][kSketchRows][kBlockKeys];
  Factors factors;
  const int steps = t.layout.width[0] / 64;
  PrefetchFirst(t);
  for (int b = 0; b < t.count; ++b) {
    if (b + kAhead < t.count) PrefetchSketches(t.layout, t.summaries[b + kAhead]);
    WidenSketches(t.layout, t.summaries[b], signs);
    LoadFactors(t.layout, t.summaries[b], &factors);
    for (int first = 0; first < t.rows; first += kSketchRows) {
      const int rows = t.rows - first < kSketchRows ? t.rows - first : kSketchRows;
      const int8_t* q = t.q + first * t.q_stride;
      const int32_t* sums = t.q_sums + int64_t{2} * first;
      kMultiply(signs, steps, q, t.q_stride, rows, sums, products[0]);
      if (t.layout.width[1] > 0) {
        kMultiply(signs + int64_t{kStepBytes} * steps, t.layout.width[1] / 64, q + t.layout.width[0],
                  t.q_stride, rows, sums + 1, products[1]);
      }
      AddLogarithms(t, first, b, products[0], products[1], factors);
    }
  }
}

}  // namespace
}  // namespace moesaic::kernels
