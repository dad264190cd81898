#include "cache/warm_codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/round.h"

namespace moesaic::cache {
namespace {

constexpr int kMost = 127;
// Columns that are worked on at once: their largest elements stay in registers, and a cache line of codes is
// written at a time.
constexpr int kColumns = 64;
// Below this a column is zero: its scale would be no normal number.
constexpr float kLeast = 1e-30F;
// Added to a float of less than 2^22, leaves it rounded to a whole number, halves to even.
constexpr float kRound = 12582912.0F;  // 1.5 x 2^23

float Load(const float& x) { return x; }
float Load(const tensor::BF16& x) { return tensor::ToFloat(x); }
void Store(float value, float& to) { to = value; }
void Store(float value, tensor::BF16& to) { to = tensor::ToBF16(value); }

// Whether none of these has all bits of its exponent, as infinities and NaN have.
template <typename Bits, Bits kExponent>
bool AllFinite(const Bits* elements, int64_t count) {
  Bits some = 0;
  for (int64_t i = 0; i < count; ++i) some |= static_cast<Bits>((elements[i] & kExponent) == kExponent);
  return some == 0;
}

// `count` columns of kBlockTokens rows that are `stride` apart.
template <typename T>
void EncodeColumns(const T* from, int count, int stride, int8_t* codes, float* scales) {
  float largest[kColumns] = {};
  for (int row = 0; row < kBlockTokens; ++row) {
    for (int i = 0; i < count; ++i) {
      const float magnitude = std::abs(Load(from[row * stride + i]));
      largest[i] = largest[i] < magnitude ? magnitude : largest[i];
    }
  }
  float inverse[kColumns];
  for (int i = 0; i < count; ++i) {
    const bool some = largest[i] >= kLeast;
    scales[i] = some ? largest[i] / kMost : 0;
    inverse[i] = some ? kMost / largest[i] : 0;
  }
  for (int row = 0; row < kBlockTokens; ++row) {
    for (int i = 0; i < count; ++i) {
      const float scaled = Load(from[row * stride + i]) * inverse[i];
      codes[row * stride + i] = static_cast<int8_t>(static_cast<int32_t>((scaled + kRound) - kRound));
    }
  }
}

// Matrices [heads][kBlockTokens][dim]; scales [heads][dim].
template <typename T>
void EncodeMatrices(const std::byte* from, int heads, int dim, int8_t* codes, float* scales) {
  const T* elements = reinterpret_cast<const T*>(from);
  for (int head = 0; head < heads; ++head) {
    const int64_t at = int64_t{head} * kBlockTokens * dim;
    for (int column = 0; column < dim; column += kColumns) {
      EncodeColumns(elements + at + column, std::min(kColumns, dim - column), dim, codes + at + column,
                    scales + int64_t{head} * dim + column);
    }
  }
}

template <typename T>
void DecodeMatrices(const int8_t* codes, const float* scales, int heads, int dim, std::byte* to) {
  T* elements = reinterpret_cast<T*>(to);
  for (int head = 0; head < heads; ++head) {
    const float* scale = scales + int64_t{head} * dim;
    for (int row = 0; row < kBlockTokens; ++row) {
      const int64_t at = (int64_t{head} * kBlockTokens + row) * dim;
      for (int i = 0; i < dim; ++i) Store(scale[i] * static_cast<float>(codes[at + i]), elements[at + i]);
    }
  }
}

}  // namespace

WarmCodec::WarmCodec(const BlockLayout& layout, bool exact)
    : layout_(layout),
      exact_(exact || layout.dtype == tensor::DType::kI8),
      key_elements_(int64_t{layout.heads} * kBlockTokens * layout.key_dim),
      value_elements_(layout.shared ? 0 : int64_t{layout.heads} * kBlockTokens * layout.value_dim),
      // Elements are a multiple of 64, so that scales are aligned, and so is the next layer.
      layer_bytes_(exact_ ? layout.layer_bytes()
                          : key_elements_ + value_elements_ +
                                base::RoundUp(
                                    (key_elements_ + value_elements_) / kBlockTokens * int64_t{sizeof(float)},
                                    kBlockTokens)) {}

bool WarmCodec::IsFinite(const std::byte* block, int layer) const {
  if (exact_) return true;
  const std::byte* keys = block + layer * layout_.layer_bytes();
  const auto finite = [&](const std::byte* from, int64_t elements) {
    return layout_.dtype == tensor::DType::kF32
               ? AllFinite<uint32_t, 0x7f800000>(reinterpret_cast<const uint32_t*>(from), elements)
               : AllFinite<uint16_t, 0x7f80>(reinterpret_cast<const uint16_t*>(from), elements);
  };
  return finite(keys, key_elements_) && finite(keys + layout_.keys_bytes(), value_elements_);
}

void WarmCodec::Encode(const std::byte* block, int layer, std::byte* to) const {
  const std::byte* keys = block + layer * layout_.layer_bytes();
  to += layer * layer_bytes_;
  if (exact_) {
    std::memcpy(to, keys, layer_bytes_);
    return;
  }
  auto* codes = reinterpret_cast<int8_t*>(to);
  auto* scales = reinterpret_cast<float*>(to + key_elements_ + value_elements_);
  const auto matrices = [&](const std::byte* from, int dim, int8_t* into, float* with) {
    if (layout_.dtype == tensor::DType::kF32) {
      EncodeMatrices<float>(from, layout_.heads, dim, into, with);
    } else {
      EncodeMatrices<tensor::BF16>(from, layout_.heads, dim, into, with);
    }
  };
  matrices(keys, layout_.key_dim, codes, scales);
  if (layout_.shared) return;
  matrices(keys + layout_.keys_bytes(), layout_.value_dim, codes + key_elements_,
           scales + int64_t{layout_.heads} * layout_.key_dim);
}

void WarmCodec::Decode(const std::byte* from, int layer, std::byte* block) const {
  std::byte* keys = block + layer * layout_.layer_bytes();
  from += layer * layer_bytes_;
  if (exact_) {
    std::memcpy(keys, from, layer_bytes_);
    return;
  }
  const auto* codes = reinterpret_cast<const int8_t*>(from);
  const auto* scales = reinterpret_cast<const float*>(from + key_elements_ + value_elements_);
  const auto matrices = [&](const int8_t* coded, const float* with, int dim, std::byte* to) {
    if (layout_.dtype == tensor::DType::kF32) {
      DecodeMatrices<float>(coded, with, layout_.heads, dim, to);
    } else {
      DecodeMatrices<tensor::BF16>(coded, with, layout_.heads, dim, to);
    }
  };
  matrices(codes, scales, layout_.key_dim, keys);
  if (layout_.shared) return;
  matrices(codes + key_elements_, scales + int64_t{layout_.heads} * layout_.key_dim, layout_.value_dim,
           keys + layout_.keys_bytes());
}

}  // namespace moesaic::cache
