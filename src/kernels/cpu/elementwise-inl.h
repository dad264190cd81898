// Elementwise micro-kernels over the lanes of simd_<isa>-inl.h, which must be included first.
#pragma once

namespace moesaic::kernels {
namespace {

// Four sums hide the four to five cycles of an FMA. More would not be faster, because a row is read from
// cache at two loads per cycle at most.
inline float SumOfSquares(const float* x, int n) {
  V sum[4] = {Zero(), Zero(), Zero(), Zero()};
  int i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
#pragma GCC unroll 4
    for (int u = 0; u < 4; ++u) {
      const V v = Load(x + i + u * kLanes);
      sum[u] = Fma(v, v, sum[u]);
    }
  }
  for (; i + kLanes <= n; i += kLanes) {
    const V v = Load(x + i);
    sum[0] = Fma(v, v, sum[0]);
  }
  if (i < n) {
    const V v = LoadFirst(x + i, n - i);
    sum[1] = Fma(v, v, sum[1]);
  }
  return SumLanes(Add(Add(sum[0], sum[1]), Add(sum[2], sum[3])));
}

inline void RmsNormRow(const float* x, const float* weight, int n, float eps, float* y) {
  const float mean = SumOfSquares(x, n) / static_cast<float>(n);
  const V inverse = Set(1.0F / __builtin_sqrtf(mean + eps));
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) Store(y + i, Mul(Mul(Load(x + i), inverse), Load(weight + i)));
  if (i < n) {
    StoreFirst(y + i, Mul(Mul(LoadFirst(x + i, n - i), inverse), LoadFirst(weight + i, n - i)), n - i);
  }
}

inline void SiluMulRow(const float* gate, const float* up, int n, float* y) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) Store(y + i, Mul(Silu(Load(gate + i)), Load(up + i)));
  if (i < n) StoreFirst(y + i, Mul(Silu(LoadFirst(gate + i, n - i)), LoadFirst(up + i, n - i)), n - i);
}

inline void AxpyRow(float scale, const float* x, int n, float* y) {
  const V s = Set(scale);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) Store(y + i, Fma(s, Load(x + i), Load(y + i)));
  if (i < n) StoreFirst(y + i, Fma(s, LoadFirst(x + i, n - i), LoadFirst(y + i, n - i)), n - i);
}

inline void AxpbyRow(float a, const float* x, float b, int n, float* y) {
  const V va = Set(a), vb = Set(b);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) Store(y + i, Add(Mul(va, Load(x + i)), Mul(vb, Load(y + i))));
  if (i < n) {
    StoreFirst(y + i, Add(Mul(va, LoadFirst(x + i, n - i)), Mul(vb, LoadFirst(y + i, n - i))), n - i);
  }
}

inline void RopeHalfRow(float* x, const float* cos, const float* sin, int dim) {
  const int half = dim / 2;
  float* y = x + half;
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const V a = Load(x + i), b = Load(y + i), c = Load(cos + i), s = Load(sin + i);
    Store(x + i, NegFma(b, s, Mul(a, c)));
    Store(y + i, Fma(b, c, Mul(a, s)));
  }
  if (i < half) {
    const int n = half - i;
    const V a = LoadFirst(x + i, n), b = LoadFirst(y + i, n);
    const V c = LoadFirst(cos + i, n), s = LoadFirst(sin + i, n);
    StoreFirst(x + i, NegFma(b, s, Mul(a, c)), n);
    StoreFirst(y + i, Fma(b, c, Mul(a, s)), n);
  }
}

inline void RopeInterleavedRow(float* x, const float* cos, const float* sin, int dim) {
  int i = 0;
  for (; i + kLanes <= dim; i += kLanes) Store(x + i, RotatePairs(Load(x + i), cos + i / 2, sin + i / 2));
  for (; i < dim; i += 2) {
    const float a = x[i], b = x[i + 1], c = cos[i / 2], s = sin[i / 2];
    x[i] = __builtin_fmaf(a, c, -(b * s));
    x[i + 1] = __builtin_fmaf(b, c, a * s);
  }
}

}  // namespace
}  // namespace moesaic::kernels
