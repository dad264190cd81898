// The router in vectors of 16 experts.
//
// The top k <= 16 of n are found without a loop of k dependent maxima. The k-th largest of the 16 lanes'
// maxima is a bound that at least k values reach, and few others. Those values are compressed, and each
// counts the ones that rank before it.
//
// The candidates of all rows are found before the first are ranked. Data stored in pieces of varying size and
// loaded as a whole must reach the cache first; a single row would wait for this longer than it computes.
#include <cstddef>

#include "kernels/cpu/route.h"
#include "kernels/cpu/simd_avx512-inl.h"
#include "kernels/ref/route.h"

namespace moesaic::kernels::cpu {
namespace {

constexpr int kMax = 16;  // maximum choices, and groups

// A row's experts that reach its bound, by ascending id.
struct Candidates {
  alignas(64) int32_t ids[kMax + 32];  // room for two more whole vectors
  int count;         // kMax + 1 if the reference must process the row: too many values tie, or one is NaN
  float max, total;  // sum of a softmax over all experts
};

// Maps floats, none of them NaN, to integers of the same order above kClosed + 1.
constexpr int32_t kClosed = INT32_MIN;
inline VI KeysOf(V x) {
  const VI bits = _mm512_castps_si512(Add(x, Zero()));  // converts -0 to 0
  return _mm512_xor_si512(bits, _mm512_srli_epi32(_mm512_srai_epi32(bits, 31), 1));
}

inline VI Iota() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

// ranks += 1 where x < y. The load is broadcast as part of the comparison: a shuffle would use the port that
// comparisons need, and the compiler emits two more instructions.
inline VI CountLess(V x, const float& y, VI ranks) {
  __mmask16 less;
  asm("vcmpps $1, %2%{1to16%}, %3, %1\n\tvpaddd %4, %0, %0%{%1%}"
      : "+v"(ranks), "=&Yk"(less)
      : "m"(y), "v"(x), "v"(_mm512_set1_epi32(1)));
  return ranks;
}
inline VI CountLess(VI x, const int32_t& y, VI ranks) {
  __mmask16 less;
  asm("vpcmpd $1, %2%{1to16%}, %3, %1\n\tvpaddd %4, %0, %0%{%1%}"
      : "+v"(ranks), "=&Yk"(less)
      : "m"(y), "v"(x), "v"(_mm512_set1_epi32(1)));
  return ranks;
}

// For each lane, counts the lanes ranked before it: those with a larger key, and those with an equal key to
// the left.
inline VI RanksOf(VI keys) {
  alignas(64) int32_t lanes[16];
  _mm512_store_si512(lanes, keys);
  // 16 integers from the (15 - j)-th on are -1 in the lanes that an equal lane j precedes: a key is greater
  // than another one minus 1 if it is greater or equal.
  static constexpr int32_t kLess[31] = {0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0,  0, 0,
                                        -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
  VI ranks = _mm512_setzero_si512();
#pragma GCC unroll 16
  for (int j = 0; j < 16; ++j) {
    ranks = CountLess(_mm512_add_epi32(keys, _mm512_loadu_si512(kLess + 15 - j)), lanes[j], ranks);
  }
  return ranks;
}

// Broadcasts lane `at`, where `at` has one bit.
inline V Broadcast(__mmask16 at, V x) {
  return _mm512_broadcastss_ps(_mm512_castps512_ps128(_mm512_maskz_compress_ps(at, x)));
}

// Returns the k-th largest lane.
inline V KthLargest(V x, int k) {
  alignas(64) float lanes[16];
  _mm512_store_ps(lanes, x);
  VI larger = _mm512_setzero_si512();
#pragma GCC unroll 16
  for (int j = 0; j < 16; ++j) larger = CountLess(x, lanes[j], larger);
  const __mmask16 kth = _mm512_cmpeq_epi32_mask(larger, _mm512_set1_epi32(k - 1));
  if (kth != 0 && (kth & (kth - 1)) == 0) return Broadcast(kth, x);
  return _mm512_set1_ps(_mm512_mask_reduce_min_ps(_mm512_cmplt_epi32_mask(larger, _mm512_set1_epi32(k)), x));
}

inline V Sigmoid(V x) {
  const V e = Exp(Sub(Zero(), Abs(x)));
  return Div(SelectNegative(x, e, Set(1.0F)), Add(Set(1.0F), e));
}

inline V Largest(const float* x, int n) {
  V largest = Load(x);
  for (int i = 16; i < n; i += 16) largest = Max(largest, Load(x + i));
  return _mm512_set1_ps(_mm512_reduce_max_ps(largest));
}

// Returns the sum of the two largest values of a group, or the largest.
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

// Finds the best groups, by ascending number.
inline void OpenGroups(const RouteTask& t, const float* choice, int32_t (&open)[kMax]) {
  const int size = t.experts / t.groups;
  alignas(64) float scores[kMax];
  for (int g = 0; g < kMax; ++g) {
    scores[g] = g < t.groups ? ScoreOfGroup(choice + g * size, size, t.top_two) : 0;
  }
  const auto there = static_cast<__mmask16>((1U << t.groups) - 1U);
  const VI keys = _mm512_mask_mov_epi32(_mm512_set1_epi32(kClosed), there, KeysOf(_mm512_load_ps(scores)));
  const __mmask16 best = _mm512_mask_cmplt_epi32_mask(there, RanksOf(keys), _mm512_set1_epi32(t.top_groups));
  _mm512_storeu_si512(open, _mm512_maskz_compress_epi32(best, Iota()));
}

// Appends those of the experts [first, first + size) that reach `bound` to the `found` ids; stops after
// kMax.
inline size_t FindIn(const float* choice, int first, int size, V bound, size_t found, int32_t* ids) {
  VI at = _mm512_add_epi32(Iota(), _mm512_set1_epi32(first));
  const auto find = [&](const float* x) {
    const __mmask16 reaches = _mm512_cmp_ps_mask(Load(x), bound, _CMP_GE_OQ);
    _mm512_storeu_si512(ids + found, _mm512_maskz_compress_epi32(reaches, at));
    found += _mm_popcnt_u32(_cvtmask16_u32(reaches));
    at = _mm512_add_epi32(at, _mm512_set1_epi32(16));
  };
  const float* x = choice + first;
  const float* const end = x + size;
  for (; x + 32 <= end && found <= kMax; x += 32) {
    find(x);
    find(x + 16);
  }
  if (x < end && found <= kMax) find(x);
  return found;
}

// Returns the maximum of each lane, including `most`; sets `nan` if a value is NaN.
inline V LargestLanes(const float* x, int n, V most, __mmask16* nan) {
  const float* const end = x + n;
  V other = most;
  __mmask16 found = *nan;
  for (; x + 32 <= end; x += 32) {
    const V a = Load(x), b = Load(x + 16);
    found |= _mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q);
    most = Max(most, a);
    other = Max(other, b);
  }
  if (x < end) {
    found |= _mm512_cmp_ps_mask(Load(x), Load(x), _CMP_UNORD_Q);
    most = Max(most, Load(x));
  }
  *nan = found;
  return Max(most, other);
}

// Computes the task's rows.
class Router {
 public:
  explicit Router(const RouteTask& task) : t_(task) {}

  void Run() {
    Candidates candidates[kRouteRows];
    for (int row = 0; row < t_.rows; ++row) Find(row, &candidates[row]);
    for (int row = 0; row < t_.rows; ++row) {
      if (candidates[row].count <= kMax) {
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

  // Returns the values by which experts are chosen: the logits, or t_.scratch.
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
    const V least = _mm512_set1_ps(-__builtin_inff());
    __mmask16 nan = 0;
    V most = LargestLanes(choice, t_.experts, least, &nan);
    c->count = kMax + 1;
    if (nan != 0) return;
    int32_t open[kMax];
    int parts = 1, size = t_.experts;
    open[0] = 0;
    if (grouped_) {
      OpenGroups(t_, choice, open);
      parts = t_.top_groups;
      size = t_.experts / t_.groups;
      most = least;
      for (int part = 0; part < parts; ++part)
        most = LargestLanes(choice + open[part] * size, size, most, &nan);
    }
    V bound = KthLargest(most, t_.top_k);
    for (;;) {
      size_t found = 0;
      for (int part = 0; part < parts && found <= kMax; ++part) {
        found = FindIn(choice, open[part] * size, size, bound, found, c->ids);
      }
      if (found <= kMax) {
        c->count = static_cast<int>(found);
        return;
      }
      // At least as many values reach the k-th largest of any k candidates, which is a higher bound unless
      // they tie.
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
      weights = Exp(Sub(logits, Broadcast(first, logits)));
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
  // Softmax does not change the order. Without a bias, logits choose like scores; if weights are also
  // normalized, the sum over all experts cancels.
  const bool by_logits_ = !t_.sigmoid && t_.bias == nullptr && !(grouped_ && t_.top_two);
  const bool only_chosen_ = by_logits_ && t_.normalize;
};

}  // namespace

void RouteAvx512(const RouteTask& t) {
  const bool grouped = t.top_groups < t.groups;
  if (t.experts % 16 != 0 || t.top_k > kMax ||
      (grouped && (t.experts / t.groups % 16 != 0 || t.groups > kMax))) {
    return ref::Route(t);
  }
  Router(t).Run();
}

}  // namespace moesaic::kernels::cpu
