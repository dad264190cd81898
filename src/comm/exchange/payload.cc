#include "comm/exchange/payload.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace moesaic::comm {
namespace {

// Rounds to the nearest e4m3fn, ties to even, for |x| <= 448 or NaN. Without branches, so that loops over it
// are vectorized. Normal numbers round their mantissa to 3 bits as integers. Numbers below 2^-6 have a
// quantum of 2^-9: adding 2^14, whose f32 quantum is 2^-9, rounds them.
inline uint8_t RoundToF8E4M3(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffU, sign = bits >> 24 & 0x80U;
  const uint32_t normal = (magnitude + 0x7ffffU + (magnitude >> 20 & 1U) - (120U << 23)) >> 20;
  const float shifted = std::bit_cast<float>(magnitude) + 16384.0F;
  const uint32_t small = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(16384.0F);
  const uint32_t finite = magnitude < (121U << 23) ? small : normal;
  return static_cast<uint8_t>((magnitude > 0x7f800000U ? 0x7fU : finite) | sign);
}

// tensor::ToBF16() without a branch, so that loops over it are vectorized.
inline uint16_t RoundToBF16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffU + (bits >> 16 & 1U)) >> 16, nan = bits >> 16 | 0x40U;
  return static_cast<uint16_t>(static_cast<int32_t>(bits & 0x7fffffffU) > 0x7f800000 ? nan : rounded);
}

// Rounds |x| <= 127 to nearest, ties to even: the quantum of f32 numbers at 3 * 2^22 is 1.
inline uint8_t RoundToInt8(float x) { return static_cast<uint8_t>(std::bit_cast<uint32_t>(x + 12582912.0F)); }

template <typename Convert>
void EncodeBlocks(const float* row, int64_t hidden, float largest, std::byte* wire, Convert convert) {
  auto* scales = wire + hidden;
  for (int64_t begin = 0; begin < hidden; begin += kScaleBlock, scales += sizeof(float)) {
    const int64_t end = std::min<int64_t>(begin + kScaleBlock, hidden);
    uint32_t peak_bits = 0;  // magnitudes are ordered as their bits are, NaN last
    for (int64_t i = begin; i < end; ++i) {
      peak_bits = std::max(peak_bits, std::bit_cast<uint32_t>(row[i]) & 0x7fffffffU);
    }
    const float peak = std::bit_cast<float>(peak_bits);
    float scale = peak / largest, inverse = peak > 0 ? largest / peak : 0;
    if (peak_bits >= 0x7f800000U) {
      scale = std::numeric_limits<float>::quiet_NaN();
      inverse = 0;
    } else if (!std::isfinite(inverse)) {  // the block is denormal
      scale = inverse = 0;
    }
    std::memcpy(scales, &scale, sizeof(scale));
    for (int64_t i = begin; i < end; ++i) {
      const float value = peak_bits >= 0x7f800000U ? 0.0F : row[i] * inverse;
      wire[i] = static_cast<std::byte>(convert(std::clamp(value, -largest, largest)));
    }
  }
}

float ElementOf(Payload payload, std::byte element) {
  const auto bits = static_cast<uint8_t>(element);
  return payload == Payload::kInt8 ? static_cast<float>(static_cast<int8_t>(bits))
                                   : tensor::F8E4M3ToFloat(bits);
}

template <bool first, typename Value>
void AddProducts(Value value, int64_t hidden, float weight, float* __restrict sum) {
  for (int64_t i = 0; i < hidden; ++i) sum[i] = (first ? 0.0F : sum[i]) + weight * value(i);
}

void WidenRow(const std::byte* row, int64_t hidden, float* out) {
  for (int64_t i = 0; i < hidden; ++i) {
    tensor::BF16 value;
    std::memcpy(&value, row + 2 * i, sizeof(value));
    out[i] = tensor::ToFloat(value);
  }
}

}  // namespace

const char* PayloadName(Payload payload) {
  constexpr const char* kNames[] = {"f32", "bf16", "int8", "f8_e4m3"};
  return kNames[static_cast<int>(payload)];
}

bool CanEncode(Payload from, Payload to) {
  return from == to || from == Payload::kF32 || (from == Payload::kBf16 && to != Payload::kF32);
}

void EncodeRow(Payload from, const std::byte* row, int64_t hidden, Payload to, std::byte* wire) {
  if (from == to) {
    std::memcpy(wire, row, static_cast<size_t>(hidden * ElementBytes(from)));
    return;
  }
  if (to == Payload::kBf16) {
    for (int64_t i = 0; i < hidden; ++i) {
      float value;
      std::memcpy(&value, row + 4 * i, sizeof(value));
      const uint16_t rounded = RoundToBF16(value);
      std::memcpy(wire + 2 * i, &rounded, sizeof(rounded));
    }
    return;
  }
  // Blocks are widened one by one: a whole row might not fit the first-level cache.
  alignas(64) float block[kScaleBlock];
  for (int64_t begin = 0, scale = 0; begin < hidden; begin += kScaleBlock, ++scale) {
    const int64_t count = std::min<int64_t>(kScaleBlock, hidden - begin);
    if (from == Payload::kBf16) {
      WidenRow(row + 2 * begin, count, block);
    } else {
      std::memcpy(block, row + 4 * begin, static_cast<size_t>(4 * count));
    }
    std::byte encoded[kScaleBlock + sizeof(float)];
    if (to == Payload::kInt8) {
      EncodeBlocks(block, count, 127, encoded, RoundToInt8);
    } else {
      EncodeBlocks(block, count, 448, encoded, RoundToF8E4M3);
    }
    std::memcpy(wire + begin, encoded, static_cast<size_t>(count));
    std::memcpy(wire + hidden + 4 * scale, encoded + count, sizeof(float));
  }
}

void DecodeRow(Payload payload, const std::byte* wire, int64_t hidden, float* row) {
  switch (payload) {
    case Payload::kF32:
      std::memcpy(row, wire, static_cast<size_t>(4 * hidden));
      return;
    case Payload::kBf16:
      WidenRow(wire, hidden, row);
      return;
    case Payload::kInt8:
    case Payload::kF8E4M3:
      for (int64_t i = 0; i < hidden; ++i) {
        float scale;
        std::memcpy(&scale, wire + hidden + 4 * (i / kScaleBlock), sizeof(scale));
        row[i] = ElementOf(payload, wire[i]) * scale;
      }
  }
}

void AccumulateRow(Payload payload, const std::byte* row, int64_t hidden, float weight, bool first,
                   float* sum) {
  if (payload == Payload::kF32) {
    const auto value = [row](int64_t i) {
      float at;
      std::memcpy(&at, row + 4 * i, sizeof(at));
      return at;
    };
    first ? AddProducts<true>(value, hidden, weight, sum) : AddProducts<false>(value, hidden, weight, sum);
    return;
  }
  const auto value = [row](int64_t i) {
    tensor::BF16 at;
    std::memcpy(&at, row + 2 * i, sizeof(at));
    return tensor::ToFloat(at);
  };
  first ? AddProducts<true>(value, hidden, weight, sum) : AddProducts<false>(value, hidden, weight, sum);
}

}  // namespace moesaic::comm
