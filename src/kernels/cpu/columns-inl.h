// Rows of 32-bit elements, pairs of bfloat16 or fours of int8, as columns: what products of 16 rows at once
// read, from tiles and from registers.
#pragma once

#include <immintrin.h>

#include <cstddef>

namespace moesaic::kernels::cpu {
namespace {

/// Rows become columns, of 32 bits each.
inline void Transpose16(__m512i* r) {
  __m512i a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
    a[4 + i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
    a[8 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
    a[12 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0x88);
    r[8 + i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0xdd);
    r[4 + i] = _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0xdd);
  }
}

/// Stores 16 rows of 64 bytes as columns: 4 bytes of each row beside each other.
inline void StoreColumns(__m512i* rows, std::byte* columns) {
  Transpose16(rows);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_store_si512(columns + 64 * i, rows[i]);
}

}  // namespace
}  // namespace moesaic::kernels::cpu
