// Rows of 32-bit elements, pairs of bfloat16 or fours of int8, as columns: what products of 16 rows at once
// read, from tiles and from registers. After the lanes of simd_avx512-inl.h.
#pragma once

#include <immintrin.h>

#include <cstddef>

namespace moesaic::kernels::cpu {
namespace {

/// Stores 16 rows of 64 bytes as columns: 4 bytes of each row beside each other.
inline void StoreColumns(__m512i* rows, std::byte* columns) {
  Transpose(rows);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_store_si512(columns + 64 * i, rows[i]);
}

}  // namespace
}  // namespace moesaic::kernels::cpu
