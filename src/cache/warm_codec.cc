#include "cache/warm_codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/round.h"

namespace moesaic::cache {
namespace {

constexpr int kMaxCode = 127;
// Columns that are encoded together: their largest elements stay in registers, and a cache line of codes is
// written at a time.
constexpr int kColumns = 64;
// Columns below this magnitude become zero, because their scale would be subnormal.
constexpr float kMinMagnitude = 1e-30F;
// Adding and subtracting it rounds a float below 2^22 to a whole number, halves to even.
constexpr float kRound = 12582912.0F;  // 1.5 x 2^23

float Load(const float& x) { return x; }
float Load(const tensor::BF16& x) { return tensor::ToFloat(x); }
void Store(float value, float& to) { to = value; }
void Store(float value, tensor::BF16& to) { to = tensor::ToBF16(value); }

// Whether no element has an exponent of all ones, as infinities and NaN have.
template <typename Bits, Bits kExponent>
bool AllFinite(const Bits* elements, int64_t count) {
  Bits some = 0;
  for (int64_t i = 0; i < count; ++i) some |= static_cast<Bits>((elements[i] & kExponent) == kExponent);
  return some == 0;
}

// `count` columns of kKvBlockTokens rows that are `stride` apart.
template <typename T>
void EncodeColumns(const T* from, int count, int stride, int8_t* codes, float* scales) {
  float largest[kColumns] = {};
  for (int row = 0; row < kKvBlockTokens; ++row) {
    for (int i = 0; i < count; ++i) {
      const float magnitude = std::abs(Load(from[row * stride + i]));
      largest[i] = largest[i] < magnitude ? magnitude : largest[i];
    }
  }
  float inverse[kColumns];
  for (int i = 0; i < count; ++i) {
    const bool some = largest[i] >= kMinMagnitude;
    scales[i] = some ? largest[i] / kMaxCode : 0;
    inverse[i] = some ? kMaxCode / largest[i] : 0;
  }
  for (int row = 0; row < kKvBlockTokens; ++row) {
    for (int i = 0; i < count; ++i) {
      const float scaled = Load(from[row * stride + i]) * inverse[i];
      codes[row * stride + i] = static_cast<int8_t>(static_cast<int32_t>((scaled + kRound) - kRound));
    }
  }
}

// A matrix [kKvBlockTokens][dim]; scales [dim].
template <typename T>
void EncodeMatrix(const std::byte* from, int dim, int8_t* codes, float* scales) {
  const T* elements = reinterpret_cast<const T*>(from);
  for (int column = 0; column < dim; column += kColumns) {
    EncodeColumns(elements + column, std::min(kColumns, dim - column), dim, codes + column, scales + column);
  }
}

template <typename T>
void DecodeMatrix(const int8_t* codes, const float* scales, int dim, std::byte* to) {
  T* elements = reinterpret_cast<T*>(to);
  for (int row = 0; row < kKvBlockTokens; ++row) {
    const int64_t at = int64_t{row} * dim;
    for (int i = 0; i < dim; ++i) Store(scales[i] * static_cast<float>(codes[at + i]), elements[at + i]);
  }
}

// Calls `call` for the keys and the values of each head, with their offset in a layer, the offsets of their
// codes and scales, and their dimensions.
template <typename Call>
void ForEachMatrix(const KvLayout& layout, const Call& call) {
  int64_t code = 0, scale = 0;
  for (int head = 0; head < layout.heads; ++head) {
    for (const int part : {0, 1}) {
      if (part == 1 && layout.shared) continue;
      const int dim = part == 0 ? layout.key_dim : layout.value_dim;
      call(head * layout.head_stride() + part * layout.value_offset(), code, scale, dim);
      code += int64_t{kKvBlockTokens} * dim;
      scale += dim;
    }
  }
}

}  // namespace

WarmCodec::WarmCodec(const KvLayout& layout, bool exact)
    : layout_(layout),
      exact_(exact || layout.dtype == tensor::DType::kI8),
      elements_(int64_t{layout.heads} * kKvBlockTokens *
                (layout.key_dim + (layout.shared ? 0 : layout.value_dim))),
      // Elements are a multiple of 64, so that scales are aligned, and so is the next layer.
      layer_bytes_(exact_ ? layout.layer_bytes() + layout.summary_stride()
                          : elements_ + base::RoundUp(elements_ / kKvBlockTokens * int64_t{sizeof(float)},
                                                      kKvBlockTokens)) {}

bool WarmCodec::IsFinite(const KvBlockView& block, int layer) const {
  if (exact_) return true;
  const std::byte* keys = block.data + layer * layout_.layer_bytes();
  return layout_.dtype == tensor::DType::kF32
             ? AllFinite<uint32_t, 0x7f800000>(reinterpret_cast<const uint32_t*>(keys), elements_)
             : AllFinite<uint16_t, 0x7f80>(reinterpret_cast<const uint16_t*>(keys), elements_);
}

void WarmCodec::Encode(const KvBlockView& block, int layer, std::byte* to) const {
  const std::byte* keys = block.data + layer * layout_.layer_bytes();
  to += layer * layer_bytes_;
  if (exact_) {
    std::memcpy(to, keys, layout_.layer_bytes());
    MOESAIC_CHECK_EQ(block.summaries != nullptr, layout_.summary_bytes > 0);
    if (layout_.summary_bytes == 0) return;
    std::memcpy(to + layout_.layer_bytes(), block.summaries + layer * block.summary_step,
                layout_.summary_stride());
    return;
  }
  auto* codes = reinterpret_cast<int8_t*>(to);
  auto* scales = reinterpret_cast<float*>(to + elements_);
  ForEachMatrix(layout_, [&](int64_t at, int64_t code, int64_t scale, int dim) {
    if (layout_.dtype == tensor::DType::kF32) {
      EncodeMatrix<float>(keys + at, dim, codes + code, scales + scale);
    } else {
      EncodeMatrix<tensor::BF16>(keys + at, dim, codes + code, scales + scale);
    }
  });
}

void WarmCodec::Decode(const std::byte* from, int layer, const KvBlockView& block) const {
  std::byte* keys = block.data + layer * layout_.layer_bytes();
  from += layer * layer_bytes_;
  if (exact_) {
    std::memcpy(keys, from, layout_.layer_bytes());
    MOESAIC_CHECK_EQ(block.summaries != nullptr, layout_.summary_bytes > 0);
    if (layout_.summary_bytes == 0) return;
    std::memcpy(block.summaries + layer * block.summary_step, from + layout_.layer_bytes(),
                layout_.summary_stride());
    return;
  }
  const auto* codes = reinterpret_cast<const int8_t*>(from);
  const auto* scales = reinterpret_cast<const float*>(from + elements_);
  ForEachMatrix(layout_, [&](int64_t at, int64_t code, int64_t scale, int dim) {
    if (layout_.dtype == tensor::DType::kF32) {
      DecodeMatrix<float>(codes + code, scales + scale, dim, keys + at);
    } else {
      DecodeMatrix<tensor::BF16>(codes + code, scales + scale, dim, keys + at);
    }
  });
}

}  // namespace moesaic::cache
