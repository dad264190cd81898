// Element types of features over the lanes of lanes_<isa>-inl.h, which must be included first.
#pragma once

namespace moesaic::graph::cpu {
namespace {

// Loads and stores the first n lanes of 16-bit elements through a small array.
template <typename E>
inline V LoadFirstWide(const uint16_t* p, int n) {
  uint16_t copy[kLanes] = {};
  for (int i = 0; i < n; ++i) copy[i] = p[i];
  return E::Load(copy);
}
template <typename E>
inline void StoreFirstWide(uint16_t* p, V x, int n) {
  uint16_t copy[kLanes];
  E::Store(copy, x);
  for (int i = 0; i < n; ++i) p[i] = copy[i];
}

struct F32 {
  using T = float;
  static V Load(const T* p) { return kernels::Load(p); }
  static V LoadFirst(const T* p, int n) { return kernels::LoadFirst(p, n); }
  static V Broadcast(const T* p) { return Set(*p); }
  static void Store(T* p, V x) { kernels::Store(p, x); }
  static void StoreFirst(T* p, V x, int n) { kernels::StoreFirst(p, x, n); }
  static void StoreOne(T* p, float x) { *p = x; }
};
struct Bf16 {
  using T = uint16_t;
  static V Load(const T* p) { return kernels::Load(p); }
  static V LoadFirst(const T* p, int n) { return LoadFirstWide<Bf16>(p, n); }
  static V Broadcast(const T* p) { return AsFloats(SetInts(static_cast<int32_t>(uint32_t{*p} << 16))); }
  static void Store(T* p, V x) { StoreBf16(p, x); }
  static void StoreFirst(T* p, V x, int n) { StoreFirstWide<Bf16>(p, x, n); }
  static void StoreOne(T* p, float x) { StoreFirst(p, Set(x), 1); }
};
struct F16 {
  using T = uint16_t;
  static V Load(const T* p) { return LoadF16(p); }
  static V LoadFirst(const T* p, int n) { return LoadFirstWide<F16>(p, n); }
  static V Broadcast(const T* p) { return Set(_cvtsh_ss(*p)); }
  static void Store(T* p, V x) { StoreF16(p, x); }
  static void StoreFirst(T* p, V x, int n) { StoreFirstWide<F16>(p, x, n); }
  static void StoreOne(T* p, float x) { StoreFirst(p, Set(x), 1); }
};

/// Calls run with the element type of `dtype`.
template <typename Run>
inline void WithElements(tensor::DType dtype, const Run& run) {
  if (dtype == tensor::DType::kF32) {
    run(F32{});
  } else if (dtype == tensor::DType::kBF16) {
    run(Bf16{});
  } else {
    run(F16{});
  }
}

/// Loads kLanes elements, or only the first n if kPart.
template <typename E, bool kPart>
inline V LoadLanes(const typename E::T* p, int n) {
  if constexpr (kPart) return E::LoadFirst(p, n);
  return E::Load(p);
}
template <typename E, bool kPart>
inline void StoreLanes(typename E::T* p, V x, int n) {
  if constexpr (kPart) {
    E::StoreFirst(p, x, n);
  } else {
    E::Store(p, x);
  }
}

template <Op op>
inline V Apply(V u, V e) {
  if constexpr (op == Op::kAdd) return Add(u, e);
  if constexpr (op == Op::kSub) return Sub(u, e);
  if constexpr (op == Op::kMul) return Mul(u, e);
  if constexpr (op == Op::kDiv) return Div(u, e);
  return u;
}

}  // namespace
}  // namespace moesaic::graph::cpu
