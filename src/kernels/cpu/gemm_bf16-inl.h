// The summation order shared by the bf16 kernels of AVX2, AVX-512 and AMX, with identical bits.
//
// It is tdpbf16ps's order. A chunk of 32 inputs is summed from zero in two chains of fused multiply-adds, one
// over the even and one over the odd inputs. Their sum is added to the running total. Denormals count as
// zero, both as input and output (Intel SDM 2, TDPBF16PS; checked on Sapphire Rapids with 5 million random
// tiles, including denormals and infinities). A kernel may thus run few rows on vector code and many rows on
// tiles, and a row's result depends on neither. vdpbf16ps sums in another order; the kernel that uses it uses
// nothing else.
#pragma once

#include <immintrin.h>

namespace moesaic::kernels::cpu {
namespace {

constexpr int kChunk = 32;  // inputs in one row of a bf16 tile

/// Sets MXCSR to flush denormals and to treat them as zero during the object's lifetime.
class FlushDenormals {
 public:
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | kFlushToZero | kDenormalsAreZero); }
  ~FlushDenormals() { _mm_setcsr(saved_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  static constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x40;
  unsigned saved_;
};

}  // namespace
}  // namespace moesaic::kernels::cpu
