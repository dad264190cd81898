// Product of row-major f32 matrices over the lanes of lanes_<isa>-inl.h and transpose-inl.h, which must be
// included first.
#pragma once

namespace moesaic::graph::cpu {
namespace {

// 6 rows times 2 vectors: 12 accumulators, 2 vectors of b and 1 of a fill 15 of AVX2's 16 registers.
constexpr int kProductRows = 6;
constexpr int kProductCols = 2 * kLanes;

template <int kRows, bool kPart>
inline void ProductBlock(const MatmulTask& t, const float* a, const float* b, int64_t b_stride, int cols,
                         float* c) {
  V sum[kRows][2];
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) sum[r][0] = sum[r][1] = Zero();
  const int first = cols < kLanes ? cols : kLanes, second = cols - first;
  for (int64_t k = 0; k < t.k; ++k) {
    const float* row = b + k * b_stride;
    const V b0 = kPart ? kernels::LoadFirst(row, first) : kernels::Load(row);
    const V b1 = kPart ? kernels::LoadFirst(row + kLanes, second) : kernels::Load(row + kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < kRows; ++r) {
      const V x = Set(a[r * t.a_stride + k]);
      sum[r][0] = Fma(x, b0, sum[r][0]);
      sum[r][1] = Fma(x, b1, sum[r][1]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kRows; ++r) {
    float* to = c + r * t.c_stride;
    if (cols == kProductCols) {  // masked stores take several times as long on AMD's AVX2 processors
      if (t.accumulate) {
        sum[r][0] = Add(kernels::Load(to), sum[r][0]);
        sum[r][1] = Add(kernels::Load(to + kLanes), sum[r][1]);
      }
      kernels::Store(to, sum[r][0]);
      kernels::Store(to + kLanes, sum[r][1]);
      continue;
    }
    if (t.accumulate) {
      sum[r][0] = Add(kernels::LoadFirst(to, first), sum[r][0]);
      if (second > 0) sum[r][1] = Add(kernels::LoadFirst(to + kLanes, second), sum[r][1]);
    }
    kernels::StoreFirst(to, sum[r][0], first);
    if (second > 0) kernels::StoreFirst(to + kLanes, sum[r][1], second);
  }
}

// Prefetches the block of rows after that at `row`. It must be inlined: GCC 12 removes calls of functions
// that only prefetch.
[[gnu::always_inline]] inline void PrefetchNext(const MatmulTask& t, int64_t row) {
  if (!t.prefetch_a) return;
  const float* next = t.a + (row + kProductRows) * t.a_stride;
  for (int64_t i = 0; i < kProductRows * t.a_stride; i += 16) __builtin_prefetch(next + i, 0, 2);
}

// ProductBlock() of one and a half vectors of columns of a packed panel: two rows share the vector of their
// last columns, so that three products replace four.
constexpr int kHalfCols = kLanes + kLanes / 2;

inline void ProductBlockOfHalves(const MatmulTask& t, const float* a, const float* panel, float* c) {
  V sum[kProductRows], halves[kProductRows / 2];
#pragma GCC unroll 6
  for (int r = 0; r < kProductRows; ++r) sum[r] = halves[r / 2] = Zero();
  for (int64_t k = 0; k < t.k; ++k) {
    const V b0 = kernels::Load(panel + k * kProductCols),
            b1 = LoadHalfTwice(panel + k * kProductCols + kLanes);
#pragma GCC unroll 3
    for (int r = 0; r < kProductRows; r += 2) {
      const V x = Set(a[r * t.a_stride + k]), y = Set(a[(r + 1) * t.a_stride + k]);
      sum[r] = Fma(x, b0, sum[r]);
      sum[r + 1] = Fma(y, b0, sum[r + 1]);
      halves[r / 2] = Fma(JoinHalves(x, y), b1, halves[r / 2]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kProductRows; ++r) kernels::Store(c + r * t.c_stride, sum[r]);
#pragma GCC unroll 3
  for (int r = 0; r < kProductRows; r += 2)
    StoreHalves(c + r * t.c_stride + kLanes, c + (r + 1) * t.c_stride + kLanes, halves[r / 2]);
}

template <bool kPart>
inline void ProductRows(const MatmulTask& t, int64_t row, const float* b, int64_t b_stride, int cols,
                        float* c) {
  for (; row + kProductRows <= t.m; row += kProductRows) {
    PrefetchNext(t, row);
    ProductBlock<kProductRows, kPart>(t, t.a + row * t.a_stride, b, b_stride, cols, c + row * t.c_stride);
  }
  const float* a = t.a + row * t.a_stride;
  float* to = c + row * t.c_stride;
  switch (t.m - row) {
    case 5:
      return ProductBlock<5, kPart>(t, a, b, b_stride, cols, to);
    case 4:
      return ProductBlock<4, kPart>(t, a, b, b_stride, cols, to);
    case 3:
      return ProductBlock<3, kPart>(t, a, b, b_stride, cols, to);
    case 2:
      return ProductBlock<2, kPart>(t, a, b, b_stride, cols, to);
    case 1:
      return ProductBlock<1, kPart>(t, a, b, b_stride, cols, to);
    default:
      return;
  }
}

// Copies columns [0, cols) of b as [k][kProductCols], with zeros beyond them.
inline void PackPanel(const MatmulTask& t, const float* b, int cols, float* panel) {
  if (t.b_transposed) {
    TransposeRows(b, t.b_stride, cols, t.k, panel, kProductCols);
    for (int64_t k = 0; k < t.k && cols < kProductCols; ++k) {
      for (int j = cols; j < kProductCols; ++j) panel[k * kProductCols + j] = 0;
    }
    return;
  }
  const int first = cols < kLanes ? cols : kLanes;
  for (int64_t k = 0; k < t.k; ++k) {
    const float* row = b + k * t.b_stride;
    kernels::Store(panel + k * kProductCols, kernels::LoadFirst(row, first));
    kernels::Store(panel + k * kProductCols + kLanes,
                   cols > kLanes ? kernels::LoadFirst(row + kLanes, cols - kLanes) : Zero());
  }
}

// Returns the number of rows that it computed, a multiple of kProductRows.
[[gnu::noinline]] int64_t ProductRowsOfHalves(const MatmulTask& t, const float* panel, float* c) {
  MatmulTask rest = t;
  for (; rest.m >= kProductRows; rest.m -= kProductRows) {
    PrefetchNext(rest, 0);
    ProductBlockOfHalves(rest, rest.a, panel, c);
    rest.a += kProductRows * t.a_stride;
    c += kProductRows * t.c_stride;
  }
  // The rest is left to the caller: its code would be inlined a second time here.
  return t.m - rest.m;
}

// Columns are taken in panels. A panel that many rows use is copied first: its rows in b may be a power of
// two apart, where they would evict one another from the L1 cache. A panel of 512 inputs fills half of it.
constexpr int64_t kPackFromRows = 24;
constexpr int64_t kPanelInputs = 512;

inline void ProductOfInputs(const MatmulTask& t, float* panel) {
  const bool pack = t.m >= kPackFromRows || t.b_transposed;
  for (int64_t col = 0; col < t.n; col += kProductCols) {
    const int cols = static_cast<int>(t.n - col < kProductCols ? t.n - col : kProductCols);
    const float* b = t.b + (t.b_transposed ? col * t.b_stride : col);
    if (pack) PackPanel(t, b, cols, panel);
    if (pack) {
      const int64_t done = cols == kHalfCols && !t.accumulate ? ProductRowsOfHalves(t, panel, t.c + col) : 0;
      ProductRows<false>(t, done, panel, kProductCols, cols, t.c + col);
    } else if (cols == kProductCols) {
      ProductRows<false>(t, 0, b, t.b_stride, cols, t.c + col);
    } else {
      ProductRows<true>(t, 0, b, t.b_stride, cols, t.c + col);
    }
  }
}

void RunMatmul(const MatmulTask& task) {
  alignas(64) float panel[kPanelInputs * kProductCols];
  MatmulTask t = task;
  int64_t done = 0;
  do {
    t.k = task.k - done < kPanelInputs ? task.k - done : kPanelInputs;
    t.a = task.a + done;
    t.b = task.b + (task.b_transposed ? done : done * task.b_stride);
    ProductOfInputs(t, panel);
    t.accumulate = true;
    done += t.k;
  } while (done < task.k);
}

}  // namespace
}  // namespace moesaic::graph::cpu
