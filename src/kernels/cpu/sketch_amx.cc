// Products with sketches on AMX tiles of int8: up to 16 query rows by 64 signs, times these by 16 keys. Signs
// are 2 for plus and 0 for minus, and sums start at the missing part: sum of q (2 b - 1).
#include "kernels/cpu/key_summary.h"
#include "kernels/cpu/simd_avx512-inl.h"
// Requires the lanes included above:
#include "kernels/cpu/amx_bf16-inl.h"
#include "kernels/cpu/sketch-inl.h"

namespace moesaic::kernels::cpu {
namespace {

constexpr int kMaxRows = 128;

struct alignas(64) Memory {
  std::byte signs[kMaxSteps * kStepBytes];
  int32_t products[2][2][kSketchRows][kBlockKeys];  // products of two groups of rows: [part][group]
  int32_t starts[2][kMaxRows][16];                  // initial values of rows' sums
};

constexpr int64_t kProductsStride = kBlockKeys * sizeof(int32_t);

/// Multiplies a part's signs by the 16 rows from `first` on.
inline void Multiply(const SketchScores& t, int first, int part, Memory* m) {
  const int before = part == 0 ? 0 : t.layout.width[0];
  const std::byte* signs = m->signs + int64_t{kStepBytes} * (before / 64);
  const int8_t* q = t.q + first * t.q_stride + before;
  const int32_t* starts = m->starts[part][first];
  _tile_loadd(0, starts, 64);
  _tile_loadd(1, starts, 64);
  _tile_loadd(2, starts, 64);
  _tile_loadd(3, starts, 64);
  for (int d = 0; d < t.layout.width[part]; d += 64, signs += kStepBytes) {
    _tile_loadd(4, q + d, t.q_stride);
    _tile_loadd(5, signs, 64);
    _tile_dpbsud(0, 4, 5);
    _tile_loadd(6, signs + 1024, 64);
    _tile_dpbsud(1, 4, 6);
    _tile_loadd(5, signs + 2048, 64);
    _tile_dpbsud(2, 4, 5);
    _tile_loadd(6, signs + 3072, 64);
    _tile_dpbsud(3, 4, 6);
  }
  int32_t* to = m->products[part][0][0];
  _tile_stored(0, to, kProductsStride);
  _tile_stored(1, to + 16, kProductsStride);
  _tile_stored(2, to + 32, kProductsStride);
  _tile_stored(3, to + 48, kProductsStride);
}

/// Multiplies 32 rows likewise, by 32 keys at a time.
inline void MultiplyTwo(const SketchScores& t, int first, int part, Memory* m) {
  const int before = part == 0 ? 0 : t.layout.width[0];
  const int8_t* q = t.q + first * t.q_stride + before;
  const int8_t* next = q + kSketchRows * t.q_stride;
  const int32_t* starts = m->starts[part][first];
  for (int half = 0; half < 2; ++half) {
    const std::byte* signs = m->signs + int64_t{kStepBytes} * (before / 64) + 2048 * half;
    _tile_loadd(0, starts, 64);
    _tile_loadd(1, starts, 64);
    _tile_loadd(2, starts + 256, 64);
    _tile_loadd(3, starts + 256, 64);
    for (int d = 0; d < t.layout.width[part]; d += 64, signs += kStepBytes) {
      _tile_loadd(4, q + d, t.q_stride);
      _tile_loadd(5, signs, 64);
      _tile_dpbsud(0, 4, 5);
      _tile_loadd(6, signs + 1024, 64);
      _tile_dpbsud(1, 4, 6);
      _tile_loadd(7, next + d, t.q_stride);
      _tile_dpbsud(2, 7, 5);
      _tile_dpbsud(3, 7, 6);
    }
    _tile_stored(0, m->products[part][0][0] + 32 * half, kProductsStride);
    _tile_stored(1, m->products[part][0][0] + 32 * half + 16, kProductsStride);
    _tile_stored(2, m->products[part][1][0] + 32 * half, kProductsStride);
    _tile_stored(3, m->products[part][1][0] + 32 * half + 16, kProductsStride);
  }
}

}  // namespace

void SketchScoresAmx(const SketchScores& t) {
  if (t.rows > kMaxRows) return SketchScoresAvx512(t);
  Memory m;
  const int parts = t.layout.width[1] > 0 ? 2 : 1;
  for (int part = 0; part < parts; ++part) {
    for (int row = 0; row < (t.rows + 15) / 16 * 16; ++row) {
      StoreInts(m.starts[part][row], SetInts(row < t.rows ? -t.q_sums[2 * row + part] : 0));
    }
  }
  const int rows = t.rows < kSketchRows ? t.rows : kSketchRows;
  Configure({rows, rows, rows, rows, rows, 16, 16, rows});
  Factors factors;
  PrefetchFirst(t);
  for (int b = 0; b < t.count; ++b) {
    if (b + kAhead < t.count) PrefetchSketches(t.layout, t.summaries[b + kAhead]);
    WidenSketches(t.layout, t.summaries[b], m.signs);
    LoadFactors(t.layout, t.summaries[b], &factors);
    Written();
    for (int first = 0; first < t.rows;) {
      const bool two = t.rows - first > kSketchRows;
      for (int part = 0; part < parts; ++part) {
        if (two) {
          MultiplyTwo(t, first, part, &m);
        } else {
          Multiply(t, first, part, &m);
        }
      }
      Written();
      for (int group = 0; group < (two ? 2 : 1); ++group, first += kSketchRows) {
        AddLogarithms(t, first, b, m.products[0][group], m.products[1][group], factors);
      }
    }
  }
  _tile_release();
}

}  // namespace moesaic::kernels::cpu
