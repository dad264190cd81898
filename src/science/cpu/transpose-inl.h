// Transposition of f32 matrices in blocks of 8 by 8, in 256-bit registers on every instruction set.
#pragma once

#include <immintrin.h>

namespace moesaic::graph::cpu {
namespace {

/// Transposes 8 rows of 8 floats.
inline void TransposeEight(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  __m256 row[8], pair[8];
#pragma GCC unroll 8
  for (int r = 0; r < 8; ++r) row[r] = _mm256_loadu_ps(from + r * from_stride);
#pragma GCC unroll 4
  for (int r = 0; r < 8; r += 2) {
    pair[r] = _mm256_unpacklo_ps(row[r], row[r + 1]);
    pair[r + 1] = _mm256_unpackhi_ps(row[r], row[r + 1]);
  }
#pragma GCC unroll 2
  for (int r = 0; r < 8; r += 4) {
    row[r] = _mm256_shuffle_ps(pair[r], pair[r + 2], 0x44);
    row[r + 1] = _mm256_shuffle_ps(pair[r], pair[r + 2], 0xee);
    row[r + 2] = _mm256_shuffle_ps(pair[r + 1], pair[r + 3], 0x44);
    row[r + 3] = _mm256_shuffle_ps(pair[r + 1], pair[r + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    _mm256_storeu_ps(to + r * to_stride, _mm256_permute2f128_ps(row[r], row[r + 4], 0x20));
    _mm256_storeu_ps(to + (r + 4) * to_stride, _mm256_permute2f128_ps(row[r], row[r + 4], 0x31));
  }
}

// The outer loop goes along the side whose rows are farther apart: rows a large power of two apart share a
// cache set, and only 8 of them are then in use at a time.
void TransposeRows(const float* from, int64_t from_stride, int64_t rows, int64_t cols, float* to,
                   int64_t to_stride) {
  const int64_t whole_rows = rows / 8 * 8, whole_cols = cols / 8 * 8;
  auto block = [&](int64_t r, int64_t c) {
    TransposeEight(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride);
  };
  if (from_stride >= to_stride) {
    for (int64_t r = 0; r < whole_rows; r += 8) {
      for (int64_t c = 0; c < whole_cols; c += 8) block(r, c);
    }
  } else {
    for (int64_t c = 0; c < whole_cols; c += 8) {
      for (int64_t r = 0; r < whole_rows; r += 8) block(r, c);
    }
  }
  for (int64_t c = whole_cols; c < cols; ++c) {
    for (int64_t r = 0; r < whole_rows; ++r) to[c * to_stride + r] = from[r * from_stride + c];
  }
  for (int64_t r = whole_rows; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) to[c * to_stride + r] = from[r * from_stride + c];
  }
}

}  // namespace
}  // namespace moesaic::graph::cpu
