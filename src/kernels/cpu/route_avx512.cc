// The router of one token in vectors of 16 experts.
//
// The top k <= 16 of n are found without a loop of k dependent maxima: the k-th largest of the 16 lanes'
// maxima is a bound that at least k values reach; few others do. Those that do are brought together, and each
// counts how many go before it.
#include "kernels/cpu/route.h"
#include "kernels/cpu/simd_avx512-inl.h"
#include "kernels/ref/route.h"

namespace moesaic::kernels::cpu {
namespace {

constexpr int kMost = 16;  // choices, and groups

// Floats, no NaN among them, as integers of the same order, which are above kClosed.
constexpr int32_t kClosed = INT32_MIN;
inline VI KeysOf(V x) {
  const VI bits = _mm512_castps_si512(Add(x, Zero()));  // -0 is 0
  return _mm512_xor_si512(bits, _mm512_srli_epi32(_mm512_srai_epi32(bits, 31), 1));
}

inline VI Iota() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }

// How many of the lanes go before each lane: those with a larger key, and those with the same on the left.
inline VI RanksOf(VI keys) {
  VI ranks = _mm512_setzero_si512();
  const VI one = _mm512_set1_epi32(1);
#pragma GCC unroll 16
  for (int j = 0; j < 16; ++j) {
    const VI other = _mm512_permutexvar_epi32(_mm512_set1_epi32(j), keys);
    const auto right = static_cast<__mmask16>(0xfffe << j);  // lanes that an equal j goes before
    const __mmask16 before =
        _mm512_cmpgt_epi32_mask(other, keys) | _mm512_mask_cmpeq_epi32_mask(right, other, keys);
    ranks = _mm512_mask_add_epi32(ranks, before, ranks, one);
  }
  return ranks;
}

inline V Sigmoid(V x) {
  const V e = Exp(Sub(Zero(), Abs(x)));
  return Div(SelectNegative(x, e, Set(1.0F)), Add(Set(1.0F), e));
}

// Of logits and bias: the reference takes them.
inline bool HasNan(const RouteTask& t) {
  __mmask16 nan = 0;
  for (int e = 0; e < t.experts; e += 16) {
    const V x = Load(t.logits + e);
    nan |= _mm512_cmp_ps_mask(x, t.bias != nullptr ? Load(t.bias + e) : x, _CMP_UNORD_Q);
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

// Bit g: whether group g is among the best.
inline unsigned OpenGroups(const RouteTask& t, const float* choice) {
  if (t.top_groups == t.groups) return ~0U;
  const int size = t.experts / t.groups;
  alignas(64) float scores[kMost];
  for (int g = 0; g < kMost; ++g) {
    scores[g] = g < t.groups ? ScoreOfGroup(choice + g * size, size, t.top_two) : 0;
  }
  const auto there = static_cast<__mmask16>((1U << t.groups) - 1U);
  const VI keys = _mm512_mask_mov_epi32(_mm512_set1_epi32(kClosed), there, KeysOf(_mm512_load_ps(scores)));
  return _mm512_mask_cmplt_epi32_mask(there, RanksOf(keys), _mm512_set1_epi32(t.top_groups));
}

// The keys of `choice` in the open groups, side by side, and where they were.
inline int OpenKeys(const RouteTask& t, const float* choice, int32_t* keys, int32_t* ids) {
  const unsigned open = OpenGroups(t, choice);
  const int size = t.experts / t.groups;
  int count = 0;
  for (int g = 0; g < t.groups; ++g) {
    if ((open >> g & 1U) == 0) continue;
    for (int e = g * size; e < (g + 1) * size; e += 16, count += 16) {
      _mm512_storeu_si512(keys + count, KeysOf(Load(choice + e)));
      _mm512_storeu_si512(ids + count, _mm512_add_epi32(Iota(), _mm512_set1_epi32(e)));
    }
  }
  return count;
}

// The ids of the top_k largest of `count` keys, by falling key. False if so many tie that they don't fit.
inline bool TopK(const RouteTask& t, const int32_t* keys, const int32_t* ids, int count) {
  VI most = _mm512_loadu_si512(keys);
  for (int i = 16; i < count; i += 16) most = _mm512_max_epi32(most, _mm512_loadu_si512(keys + i));
  const VI last = _mm512_set1_epi32(t.top_k - 1);
  const VI bound =
      _mm512_set1_epi32(_mm512_mask_reduce_max_epi32(_mm512_cmpeq_epi32_mask(RanksOf(most), last), most));
  alignas(64) int32_t found_keys[kMost + 16], found_ids[kMost + 16];
  int found = 0;
  for (int i = 0; i < count; i += 16) {
    const VI key = _mm512_loadu_si512(keys + i);
    const __mmask16 reaches = _mm512_cmpge_epi32_mask(key, bound);
    _mm512_storeu_si512(found_keys + found, _mm512_maskz_compress_epi32(reaches, key));
    _mm512_storeu_si512(found_ids + found, _mm512_maskz_compress_epi32(reaches, _mm512_loadu_si512(ids + i)));
    found += __builtin_popcount(reaches);
    if (found > kMost) return false;
  }
  const auto there = static_cast<__mmask16>((1U << found) - 1U);
  const VI key = _mm512_mask_mov_epi32(_mm512_set1_epi32(kClosed), there, _mm512_load_si512(found_keys));
  const VI ranks = RanksOf(key);
  const __mmask16 chosen = _mm512_mask_cmple_epi32_mask(there, ranks, last);
  _mm512_mask_i32scatter_epi32(t.ids, chosen, ranks, _mm512_load_si512(found_ids), 4);
  return true;
}

}  // namespace

void RouteAvx512(const RouteTask& t) {
  const int size = t.experts / t.groups;
  const bool grouped = t.top_groups < t.groups;
  if (t.experts % 16 != 0 || t.top_k > kMost || (grouped && (size % 16 != 0 || t.groups > kMost)) ||
      (!grouped && t.groups > 1) || HasNan(t)) {
    return ref::Route(t);
  }
  float* scores = t.scratch;
  float* biased = scores + t.experts;
  auto* keys = reinterpret_cast<int32_t*>(biased + t.experts);
  auto* ids = keys + t.experts;
  const V max = t.sigmoid ? Zero() : Largest(t.logits, t.experts);
  // Softmax doesn't change the order: without a bias, logits choose as well as scores do, and if weights are
  // normalized, the sum over all experts cancels.
  const bool by_logits = !t.sigmoid && t.bias == nullptr && !(grouped && t.top_two);
  const bool only_chosen = by_logits && t.normalize;
  V sum = Zero();
  for (int e = 0; e < t.experts && !only_chosen; e += 16) {
    const V x = Load(t.logits + e);
    const V score = t.sigmoid ? Sigmoid(x) : Exp(Sub(x, max));
    Store(scores + e, score);
    sum = Add(sum, score);
  }
  const float total = t.sigmoid || only_chosen ? 1 : _mm512_reduce_add_ps(sum);
  const float* choice = by_logits ? t.logits : scores;
  if (!by_logits) {
    for (int e = 0; e < t.experts; e += 16) {
      V score = Load(scores + e);
      if (!t.sigmoid) score = Div(score, Set(total));
      Store(scores + e, score);
      if (t.bias != nullptr) Store(biased + e, Add(score, Load(t.bias + e)));
    }
    if (t.bias != nullptr) choice = biased;
  }
  const int count = OpenKeys(t, choice, keys, ids);
  if (!TopK(t, keys, ids, count)) return ref::Route(t);

  const auto mask = static_cast<__mmask16>((1U << t.top_k) - 1U);
  const VI chosen = _mm512_maskz_loadu_epi32(mask, t.ids);
  V weights = _mm512_mask_i32gather_ps(Zero(), mask, chosen, only_chosen ? t.logits : scores, 4);
  if (only_chosen) {
    weights = _mm512_maskz_mov_ps(mask, Exp(Sub(weights, max)));
  } else if (by_logits) {
    weights = Div(weights, Set(total));
  }
  if (t.normalize) {
    float all = _mm512_reduce_add_ps(weights);
    if (t.sigmoid) all += 1e-20F;
    weights = Div(weights, Set(all));
  }
  _mm512_mask_storeu_ps(t.weights, mask, Mul(weights, Set(t.scale)));
}

}  // namespace moesaic::kernels::cpu
