// Sketches with vpdpbusd: the lanes are signs of 16 keys, four dimensions each, and four elements of a query
// meet all of them. The sums are integers, so the bits equal those of the other instruction sets.
#include "kernels/cpu/key_summary.h"
#include "kernels/cpu/simd_avx512-inl.h"
// Requires the lanes included above:
#include "kernels/cpu/sketch-inl.h"
#include "kernels/cpu/vnni-inl.h"

namespace moesaic::kernels::cpu {
namespace {

constexpr int kRows = 8, kKeys = 32;  // rows and keys whose sums are in registers

inline void MultiplyRows(const std::byte* signs, int steps, const int8_t* q, int64_t q_stride, int rows,
                         const int32_t* q_sums, int32_t (*products)[kBlockKeys]) {
  for (int key = 0; key < kBlockKeys; key += kKeys) {
    __m512i sums[kRows][2];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      sums[row][0] = sums[row][1] = SetInts(row < rows ? -q_sums[2 * row] : 0);
    }
    for (int step = 0; step < steps; ++step) {
      const std::byte* at = signs + int64_t{kStepBytes} * step + key / 16 * 1024;
      const int8_t* x = q + 64 * step;
      for (int quad = 0; quad < 16; ++quad, at += 64, x += 4) {
        const __m512i first = LoadBytes(at), second = LoadBytes(at + 1024);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          const __m512i four = Four(x + row * q_stride);
          Dot(sums[row][0], first, four);
          Dot(sums[row][1], second, four);
        }
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      StoreInts(products[row] + key, sums[row][0]);
      StoreInts(products[row] + key + 16, sums[row][1]);
    }
  }
}

void Multiply(const std::byte* signs, int steps, const int8_t* q, int64_t q_stride, int rows,
              const int32_t* q_sums, int32_t (*products)[kBlockKeys]) {
  for (int row = 0; row < rows; row += kRows) {
    MultiplyRows(signs, steps, q + row * q_stride, q_stride, rows - row, q_sums + 2 * row, products + row);
  }
}

}  // namespace

void SketchScoresAvx512Vnni(const SketchScores& scores) { RunSketchScores<Multiply>(scores); }

}  // namespace moesaic::kernels::cpu
