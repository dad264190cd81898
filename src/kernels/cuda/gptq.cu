// GPTQ's kernels. NVRTC compiles them for the detected card, without contraction; a test compiles them as C++
// (test_accelerator.h) and runs one thread after another. Threads therefore share nothing: each has its own
// column of shared memory, and there are no barriers.
#include "kernels/cuda/gptq_args.h"

namespace moesaic::kernels::cuda {

__device__ inline long long ThreadNumber() {
  return static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// Rounds finite values to nearest, ties to even.
__device__ inline unsigned short ToBF16(float value) {
  const unsigned bits = __float_as_uint(value);
  return static_cast<unsigned short>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

// Rounds to the nearest integer, ties to even, for |x| < 2^22: in x + 1.5 x 2^23 the last bit has value 1.
__device__ inline float RoundEven(float x) { return (x + 12582912.0F) - 12582912.0F; }
__device__ inline float Min(float a, float b) { return a < b ? a : b; }
__device__ inline float Max(float a, float b) { return a > b ? a : b; }
__device__ inline float Magnitude(float x) { return __uint_as_float(__float_as_uint(x) & 0x7fffffffU); }
__device__ inline float WithSign(float magnitude, float of) {
  return __uint_as_float(__float_as_uint(magnitude) | (__float_as_uint(of) & 0x80000000U));
}

// Rounds a weight divided by its scale to the nearest number, and returns the number's code:
// kernels/rounding.h.
template <int kLow, int kHigh>
struct Integers {
  __device__ static float Nearest(float q) { return RoundEven(Min(Max(q, kLow), kHigh)); }
  __device__ static unsigned char Code(float number) {
    return static_cast<unsigned char>(static_cast<int>(number) & 0xff);
  }
};

struct E2M1 {
  __device__ static float Nearest(float q) {
    const float m = Min(Magnitude(q), 6);
    const float rounded = m < 2 ? 0.5F * RoundEven(2 * m) : m < 4 ? RoundEven(m) : 2 * RoundEven(0.5F * m);
    return WithSign(rounded, q);
  }
  __device__ static unsigned char Code(float number) {
    const float m = Magnitude(number);
    const float code = m < 2 ? 2 * m : m < 4 ? m + 2 : 0.5F * m + 4;
    return static_cast<unsigned char>(static_cast<unsigned>(code) | (__float_as_uint(number) >> 28 & 8U));
  }
};

struct E4M3 {
  static constexpr float kMinNormal = 0.015625F;
  __device__ static float Nearest(float q) {
    const float m = Min(Magnitude(q), 448);
    const unsigned bits = __float_as_uint(m);
    const float normal = __uint_as_float((bits + 0x7ffffU + (bits >> 20 & 1U)) & 0xfff00000U);
    const float denormal = (m + 16384.0F) - 16384.0F;  // steps of 2^-9
    return WithSign(m < kMinNormal ? denormal : normal, q);
  }
  __device__ static unsigned char Code(float number) {
    const float m = Magnitude(number);
    const unsigned normal = (__float_as_uint(m) - 0x3c000000U) >> 20;
    const unsigned denormal = static_cast<unsigned>(Min(m, 1) * 512);
    return static_cast<unsigned char>((m < kMinNormal ? denormal : normal) |
                                      (__float_as_uint(number) >> 24 & 0x80U));
  }
};

template <typename Numbers>
__device__ inline void RoundBlockOf(const RoundBlockArgs& a) {
  __shared__ float errors[kBlockColumns][kBlockRows];
  const int lane = static_cast<int>(threadIdx.x);
  const long long row = ThreadNumber();
  if (row >= a.rows) return;
  float loss = a.losses[row];
  for (int c = 0; c < a.columns; ++c) {
    const float* factor = a.factor + c * kBlockColumns;
    float sum = a.corrections[static_cast<long long>(c) * a.rows_padded + row];
    for (int i = 0; i < c; ++i) sum += errors[i][lane] * factor[i];
    const int input = a.order[a.begin + c];
    const long long at = static_cast<long long>(a.begin + c) * a.rows_padded + row;
    const float scale = a.scales[static_cast<long long>(input / a.group) * a.rows_padded + row];
    const float value = a.values[at], wanted = value + sum / factor[c];
    const float number = Numbers::Nearest(wanted / scale);
    const float rounded = number * scale, missed = (wanted - rounded) * factor[c];
    errors[c][lane] = value - rounded;
    a.errors[at] = ToBF16(value - rounded);
    a.codes[row * a.k + input] = Numbers::Code(number);
    loss += missed * missed;
  }
  a.losses[row] = loss;
}

extern "C" __global__ void OrderMatrix(const OrderMatrixArgs a) {
  const long long size = a.k_padded, at = ThreadNumber();
  if (at >= size * size) return;
  const int p = static_cast<int>(size - 1 - at % size), q = static_cast<int>(size - 1 - at / size);
  float value = p == q ? 1.0F : 0.0F;
  if (p < a.k && q < a.k) {
    const int i = a.order[p], j = a.order[q];
    value = a.scale * (i >= j ? a.sums[i * size + j] : a.sums[j * size + i]);
    if (p == q) value += a.added;
  }
  a.matrix[at] = value;
}

extern "C" __global__ void ReverseFactor(const ReverseFactorArgs a) {
  const long long size = a.k_padded, at = ThreadNumber();
  if (at >= size * size) return;
  const int c = static_cast<int>(at / size), i = static_cast<int>(at % size);
  const float value = i <= c ? a.matrix[size * size - 1 - at] : 0.0F;
  a.panels[at] = ToBF16(value);
  if (i / kBlockColumns == c / kBlockColumns) {
    a.diagonal_blocks[static_cast<long long>(c) * kBlockColumns + i % kBlockColumns] = value;
  }
  if (i == c) a.diagonal[c] = value;
}

extern "C" __global__ void CopyDiagonal(const CopyDiagonalArgs a) {
  const long long i = ThreadNumber();
  if (i < a.k) a.diagonal[i] = a.sums[i * a.k_padded + i];
}

extern "C" __global__ void GatherWeights(const GatherWeightsArgs a) {
  const long long at = ThreadNumber(), row = at % a.rows_padded, column = at / a.rows_padded;
  if (column >= a.k) return;
  a.values[at] = row < a.rows ? a.weights[row * a.k + a.order[column]] : 0.0F;
}

extern "C" __global__ void RoundInt8(const RoundBlockArgs a) { RoundBlockOf<Integers<-127, 127>>(a); }
extern "C" __global__ void RoundInt4(const RoundBlockArgs a) { RoundBlockOf<Integers<-8, 7>>(a); }
extern "C" __global__ void RoundE2M1(const RoundBlockArgs a) { RoundBlockOf<E2M1>(a); }
extern "C" __global__ void RoundE4M3(const RoundBlockArgs a) { RoundBlockOf<E4M3>(a); }

}  // namespace moesaic::kernels::cuda
