// Transposes rows of 32-bit elements (pairs of bfloat16 or groups of four int8) to columns, the operand
// layout of products of 16 rows on tiles and in registers. Requires the lanes of simd_avx512-inl.h.
#pragma once

#include <immintrin.h>

#include <cstddef>

namespace moesaic::kernels::cpu {
namespace {

/// Stores 16 rows of 64 bytes as columns: 4 bytes of each row are adjacent.
inline void StoreColumns(__m512i* rows, std::byte* columns) {
  Transpose(rows);
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) _mm512_store_si512(columns + 64 * i, rows[i]);
}

}  // namespace
}  // namespace moesaic::kernels::cpu
