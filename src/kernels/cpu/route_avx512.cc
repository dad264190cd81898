// The router in vectors of 16 experts.
//
// The top k <= 16 of n are found without a loop of k dependent maxima: the k-th largest of the 16 lanes'
// maxima is a bound that at least k values reach; few others do. Those that do are brought together, and each
// counts how many go before it.
//
// All rows' candidates are found before the first are ranked: what is stored in pieces of any size and loaded
// as a whole has to reach the cache in between, for which a row alone would wait longer than it computes.
#include <algorithm>

#include "kernels/cpu/route.h"
#include "kernels/cpu/simd_avx512-inl.h"
#include "kernels/ref/route.h"

namespace moesaic::kernels::cpu {
namespace {

constexpr int kMost = 16;  // choices, and groups

// A row's experts that reach its bound, by rising id.
struct Candidates {
  alignas(64) int32_t ids[kMost + 16];
  int count;         // kMost + 1 where the reference has to do the row: too many tie, or one is not a number
  float max, total;  // of a softmax over all experts
};

// Floats, no NaN among them, as integers of the same order, which are above kClosed + 1.
constexpr int32_t kClosed = INT32_MIN;
inline VI KeysOf(V x) {
  const VI bits = _mm512_castps_si512(Add(x, Zero()));  // -0 is 0
  return _mm512_xor_si512(bits, _mm512_srli_epi32(_mm512_srai_epi32(bits, 31), 1));
}

inline VI Iota() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

// Loads of single lanes are broadcast as part of the comparison, where a shuffle would take the port that
// comparisons need. The compiler must not see what stands there, or it shuffles after all.
template <typename T>
inline void Hide(T (&lanes)[16]) {
  asm("" : "+m"(lanes));
}

// How many of the lanes go before each lane: those with a larger key, and those with the same on the left.
inline VI RanksOf(VI keys) {
  alignas(64) int32_t lanes[16];
  _mm512_store_si512(lanes, keys);
  Hide(lanes);
  // 16 integers from the (15 - j)-th on are -1 in the lanes that an equal lane j goes before: above a key
  // less one is what is above it or equal.
  static constexpr int32_t kLess[31] = {0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0, 0,
                                        -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
  VI ranks = _mm512_setzero_si512();
  const VI one = _mm512_set1_epi32(1);
#pragma GCC unroll 16
  for (int j = 0; j < 16; ++j) {
    const VI least = _mm512_add_epi32(keys, _mm512_loadu_si512(kLess + 15 - j));
    const __mmask16 before = _mm512_cmplt_epi32_mask(least, _mm512_set1_epi32(lanes[j]));
    ranks = _mm512_mask_add_epi32(ranks, before, ranks, one);
  }
  return ranks;
}

// The k-th largest lane.
inline V KthLargest(V x, int k) {
  alignas(64) float lanes[16];
  _mm512_store_ps(lanes, x);
  Hide(lanes);
  VI larger = _mm512_setzero_si512();
  const VI one = _mm512_set1_epi32(1);
#pragma GCC unroll 16
  for (int j = 0; j < 16; ++j) {
    const __mmask16 less = _mm512_cmp_ps_mask(x, _mm512_set1_ps(lanes[j]), _CMP_LT_OQ);
    larger = _mm512_mask_add_epi32(larger, less, larger, one);
  }
  return _mm512_set1_ps(_mm512_mask_reduce_min_ps(_mm512_cmplt_epi32_mask(larger, _mm512_set1_epi32(k)), x));
}

inline V Sigmoid(V x) {
  const V e = Exp(Sub(Zero(), Abs(x)));
  return Div(SelectNegative(x, e, Set(1.0F)), Add(Set(1.0F), e));
}

inline bool HasNan(const float* x, int n) {
  __mmask16 nan = 0;
  for (int i = 0; i < n; i += 32) {  // two at a time; of an odd number, the last with itself
    nan |= _mm512_cmp_ps_mask(Load(x + i), Load(x + std::min(i + 16, n - 16)), _CMP_UNORD_Q);
  }
  return nan != 0;
}

inline V Largest(const float* x, int n) {
  V largest = Load(x);
  for (int i = 16; i < n; i += 16) largest = Max(largest, Load(x + i));
  return _mm512_set1_ps(_mm512_reduce_max_ps(largest));
}

// The sum of the two largest lanes of x0 and what follows it, or the largest.
inline float ScoreOfGroup(const float* x, int size, bool top_two) {
  V first = Load(x), second = _mm512_set1_ps(-__builtin_inff());
  for (int i = 16; i < size; i += 16) {
    const V other = Load(x + i);
    second = Max(second, _mm512_min_ps(first, other));
    first = Max(first, other);
  }
  if (!top_two) return _mm512_reduce_max_ps(first);
  const auto merge = [&](V first_swapped, V second_swapped) {
    second = Max(_mm512_min_ps(first, first_swapped), Max(second, second_swapped));
    first = Max(first, first_swapped);
  };
  merge(_mm512_shuffle_f32x4(first, first, 0x4e), _mm512_shuffle_f32x4(second, second, 0x4e));
  merge(_mm512_shuffle_f32x4(first, first, 0xb1), _mm512_shuffle_f32x4(second, second, 0xb1));
  merge(_mm512_permute_ps(first, 0x4e), _mm512_permute_ps(second, 0x4e));
  merge(_mm512_permute_ps(first, 0xb1), _mm512_permute_ps(second, 0xb1));
  return _mm512_cvtss_f32(Add(first, second));
}

// The best groups, by rising number.
inline void OpenGroups(const RouteTask& t, const float* choice, int32_t (&open)[kMost]) {
  const int size = t.experts / t.groups;
  alignas(64) float scores[kMost];
  for (int g = 0; g < kMost; ++g) {
    scores[g] = g < t.groups ? ScoreOfGroup(choice + g * size, size, t.top_two) : 0;
  }
  const auto there = static_cast<__mmask16>((1U << t.groups) - 1U);
  const VI keys = _mm512_mask_mov_epi32(_mm512_set1_epi32(kClosed), there, KeysOf(_mm512_load_ps(scores)));
  const __mmask16 best = _mm512_mask_cmplt_epi32_mask(there, RanksOf(keys), _mm512_set1_epi32(t.top_groups));
  _mm512_storeu_si512(open, _mm512_maskz_compress_epi32(best, Iota()));
}

// Adds those of the experts [first, first + size) that reach `bound` to the `found` ids; stops behind kMost.
inline int FindIn(const float* choice, int first, int size, V bound, int found, int32_t* ids) {
  VI at = _mm512_add_epi32(Iota(), _mm512_set1_epi32(first));
  for (int e = first; e < first + size && found <= kMost; e += 16) {
    const __mmask16 reaches = _mm512_cmp_ps_mask(Load(choice + e), bound, _CMP_GE_OQ);
    _mm512_storeu_si512(ids + found, _mm512_maskz_compress_epi32(reaches, at));
    found += __builtin_popcount(reaches);
    at = _mm512_add_epi32(at, _mm512_set1_epi32(16));
  }
  return found;
}

// How the task's rows are computed.
class Router {
 public:
  explicit Router(const RouteTask& task) : t_(task) {}

  void Run() {
    Candidates candidates[kRouteRows];
    for (int row = 0; row < t_.rows; ++row) Find(row, &candidates[row]);
    for (int row = 0; row < t_.rows; ++row) {
      if (candidates[row].count <= kMost) {
        Rank(row, candidates[row]);
      } else {
        RunReference(row);
      }
    }
  }

 private:
  void RunReference(int row) const {
    RouteTask task = t_;
    task.rows = 1;
    task.logits += int64_t{row} * t_.experts;
    task.ids += row * t_.top_k;
    task.weights += row * t_.top_k;
    ref::Route(task);
  }

  V ScoreOf(V logits, const Candidates& c) const {
    return t_.sigmoid ? Sigmoid(logits) : Div(Exp(Sub(logits, Set(c.max))), Set(c.total));
  }

  // What experts are chosen by: their logits, or t_.scratch.
  const float* ChoiceOf(const float* logits, Candidates* c) const {
    if (!t_.sigmoid && !only_chosen_) {
      const V max = Largest(logits, t_.experts);
      V sum = Zero();
      for (int e = 0; e < t_.experts; e += 16) sum = Add(sum, Exp(Sub(Load(logits + e), max)));
      c->max = _mm512_cvtss_f32(max);
      c->total = _mm512_reduce_add_ps(sum);
    }
    if (by_logits_) return logits;
    for (int e = 0; e < t_.experts; e += 16) {
      const V score = ScoreOf(Load(logits + e), *c);
      Store(t_.scratch + e, t_.bias != nullptr ? Add(score, Load(t_.bias + e)) : score);
    }
    return t_.scratch;
  }

  void Find(int row, Candidates* c) const {
    const float* choice = ChoiceOf(t_.logits + int64_t{row} * t_.experts, c);
    int32_t open[kMost] = {0};
    int parts = 1, size = t_.experts;
    if (grouped_) {
      OpenGroups(t_, choice, open);
      parts = t_.top_groups;
      size = t_.experts / t_.groups;
    }
    V most = _mm512_set1_ps(-__builtin_inff());
    for (int part = 0; part < parts; ++part) {
      for (int e = open[part] * size; e < (open[part] + 1) * size; e += 16)
        most = Max(most, Load(choice + e));
    }
    c->count = kMost + 1;
    if (HasNan(choice, t_.experts)) return;
    V bound = KthLargest(most, t_.top_k);
    for (;;) {
      int found = 0;
      for (int part = 0; part < parts && found <= kMost; ++part) {
        found = FindIn(choice, open[part] * size, size, bound, found, c->ids);
      }
      c->count = found;
      if (found <= kMost) return;
      // As many reach the k-th largest of any of them, which is higher unless they tie.
      const V higher = KthLargest(_mm512_i32gather_ps(_mm512_load_si512(c->ids), choice, 4), t_.top_k);
      if (_mm512_cmp_ps_mask(higher, bound, _CMP_GT_OQ) == 0) return;
      bound = higher;
    }
  }

  void Rank(int row, const Candidates& c) const {
    const float* all = t_.logits + int64_t{row} * t_.experts;
    const auto there = static_cast<__mmask16>((1U << c.count) - 1U);
    const VI ids = _mm512_load_si512(c.ids);
    const V logits = _mm512_mask_i32gather_ps(Zero(), there, ids, all, 4);
    V weights = only_chosen_ ? logits : ScoreOf(logits, c);
    V choice = by_logits_ ? logits : weights;
    if (t_.bias != nullptr) choice = Add(choice, _mm512_mask_i32gather_ps(Zero(), there, ids, t_.bias, 4));
    const VI ranks = RanksOf(_mm512_mask_mov_epi32(_mm512_set1_epi32(kClosed), there, KeysOf(choice)));
    const __mmask16 chosen = _mm512_mask_cmplt_epi32_mask(there, ranks, _mm512_set1_epi32(t_.top_k));
    _mm512_mask_i32scatter_epi32(t_.ids + row * t_.top_k, chosen, ranks, ids, 4);
    if (only_chosen_) {
      const __mmask16 first = _mm512_mask_cmpeq_epi32_mask(chosen, ranks, _mm512_setzero_si512());
      const V max = _mm512_broadcastss_ps(_mm512_castps512_ps128(_mm512_maskz_compress_ps(first, logits)));
      weights = Exp(Sub(logits, max));
    }
    float scale = t_.scale;
    if (t_.normalize) {
      const float sum = _mm512_mask_reduce_add_ps(chosen, weights);
      scale /= t_.sigmoid ? sum + 1e-20F : sum;
    }
    _mm512_mask_i32scatter_ps(t_.weights + row * t_.top_k, chosen, ranks, Mul(weights, Set(scale)), 4);
  }

  const RouteTask& t_;
  const bool grouped_ = t_.top_groups < t_.groups;
  // Softmax doesn't change the order: without a bias, logits choose as well as scores do, and if weights are
  // normalized, the sum over all experts cancels.
  const bool by_logits_ = !t_.sigmoid && t_.bias == nullptr && !(grouped_ && t_.top_two);
  const bool only_chosen_ = by_logits_ && t_.normalize;
};

}  // namespace

void RouteAvx512(const RouteTask& t) {
  const bool grouped = t.top_groups < t.groups;
  if (t.experts % 16 != 0 || t.top_k > kMost ||
      (grouped && (t.experts / t.groups % 16 != 0 || t.groups > kMost))) {
    return ref::Route(t);
  }
  Router(t).Run();
}

}  // namespace moesaic::kernels::cpu
