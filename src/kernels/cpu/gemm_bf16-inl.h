// The one order of sums in which the bf16 kernels of AVX2, AVX-512 and AMX all compute, bit for bit the same.
//
// It is tdpbf16ps's: a chunk of 32 inputs is summed from zero in two chains of fused multiply-adds, one over
// the even and one over the odd inputs; their sum is added to the running total; denormals count as zero, on
// the way in and out (Intel SDM 2, TDPBF16PS; checked on Sapphire Rapids against 5 million random tiles,
// denormals and infinities among them). So a kernel may hand a few rows to vector code and many rows to
// tiles, and a row's result depends on neither. vdpbf16ps sums in another order; the kernel that uses it uses
// nothing else.
#pragma once

#include <immintrin.h>

namespace moesaic::kernels::cpu {
namespace {

constexpr int kChunk = 32;  // inputs in one row of a bf16 tile

/// Sets MXCSR to flush denormals and to treat them as zero, for the life of the object.
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
