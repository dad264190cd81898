#include "comm/collectives/wire_codec.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "tensor/dtype.h"

namespace moesaic::comm {
namespace {

constexpr float kSmallest = 0x1p-100F;

// 16 significant bits: 127 * scale is exact, so the scale of decoded values is the same again.
float RoundUpScale(float scale) {
  const uint32_t bits = std::bit_cast<uint32_t>(scale);
  return std::bit_cast<float>((bits + 0xffU) & ~0xffU);
}

void EncodeGroup(std::span<const float> values, float* scale, int8_t* quantized) {
  float largest = 0;
  bool finite = true;
  for (const float value : values) {
    const float magnitude = std::fabs(value);
    finite &= magnitude <= std::numeric_limits<float>::max();
    largest = std::max(largest, magnitude);
  }
  if (!finite || largest < kSmallest) {
    *scale = finite ? 0 : std::numeric_limits<float>::quiet_NaN();
    std::memset(quantized, 0, values.size());
    return;
  }
  *scale = RoundUpScale(largest / 127);
  // Adding 1.5 * 2^23 rounds to an integer, halves to even, in the low bits of the sum.
  constexpr float kRound = 0x1.8p23F;
  for (size_t i = 0; i < values.size(); ++i) {
    const float sum = values[i] / *scale + kRound;
    quantized[i] = static_cast<int8_t>(std::bit_cast<int32_t>(sum) - std::bit_cast<int32_t>(kRound));
  }
}

}  // namespace

int64_t EncodedBytes(WireFormat wire, int64_t count) {
  switch (wire) {
    case WireFormat::kExact:
      return count * 4;
    case WireFormat::kBf16:
      return count * 2;
    case WireFormat::kInt8:
      return count + (count + kWireGroup - 1) / kWireGroup * 4;
  }
  return 0;
}

void Encode(WireFormat wire, std::span<const float> values, std::byte* encoded) {
  if (wire == WireFormat::kBf16) {
    for (size_t i = 0; i < values.size(); ++i) {
      const tensor::BF16 value = tensor::ToBF16(values[i]);
      std::memcpy(encoded + 2 * i, &value, 2);
    }
    return;
  }
  std::array<int8_t, kWireGroup> group;
  for (size_t at = 0; at < values.size(); at += kWireGroup) {
    const size_t size = std::min<size_t>(kWireGroup, values.size() - at);
    float scale = 0;
    EncodeGroup(values.subspan(at, size), &scale, group.data());
    std::memcpy(encoded, &scale, 4);
    std::memcpy(encoded + 4, group.data(), size);
    encoded += 4 + size;
  }
}

void Decode(WireFormat wire, const std::byte* encoded, std::span<float> values) {
  if (wire == WireFormat::kBf16) {
    for (size_t i = 0; i < values.size(); ++i) {
      tensor::BF16 value{};
      std::memcpy(&value, encoded + 2 * i, 2);
      values[i] = tensor::ToFloat(value);
    }
    return;
  }
  for (size_t at = 0; at < values.size(); at += kWireGroup) {
    float scale = 0;
    std::memcpy(&scale, encoded, 4);
    encoded += 4;
    const size_t size = std::min<size_t>(kWireGroup, values.size() - at);
    for (size_t i = 0; i < size; ++i)
      values[at + i] = scale * static_cast<float>(static_cast<int8_t>(encoded[i]));
    encoded += size;
  }
}

void RoundToWire(WireFormat wire, std::span<float> values) {
  std::array<std::byte, kWireGroup + 4> encoded;
  std::array<std::byte, kWireGroup * 2> halves;
  for (size_t at = 0; at < values.size(); at += kWireGroup) {
    const std::span<float> group = values.subspan(at, std::min<size_t>(kWireGroup, values.size() - at));
    std::byte* const bytes = wire == WireFormat::kBf16 ? halves.data() : encoded.data();
    Encode(wire, group, bytes);
    Decode(wire, bytes, group);
  }
}

}  // namespace moesaic::comm
