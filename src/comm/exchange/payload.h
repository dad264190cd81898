// Encodings of rows on the wire: f32, bf16, and int8 or FP8 e4m3 with one f32 scale per 128 elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/status.h"
#include "tensor/dtype.h"

namespace moesaic::comm {

enum class Payload : uint8_t { kF32, kBf16, kInt8, kF8E4M3 };

inline constexpr int kScaleBlock = 128;

/// Returns the bytes of one element.
inline int64_t ElementBytes(Payload payload) {
  return payload == Payload::kF32 ? 4 : payload == Payload::kBf16 ? 2 : 1;
}
/// Returns the number of scales of a row of `hidden` elements: 0 for kF32 and kBf16.
inline int64_t ScalesPerRow(Payload payload, int64_t hidden) {
  return payload == Payload::kF32 || payload == Payload::kBf16 ? 0 : (hidden + kScaleBlock - 1) / kScaleBlock;
}
/// Returns the bytes of a row on the wire: its elements, then its scales.
inline int64_t WireRowBytes(Payload payload, int64_t hidden) {
  return ElementBytes(payload) * hidden + 4 * ScalesPerRow(payload, hidden);
}
const char* PayloadName(Payload payload);

/// Rows of a caller. `scales` is empty for kF32 and kBf16; otherwise [rows, ScalesPerRow()].
struct PayloadRows {
  Payload payload = Payload::kF32;
  std::span<const std::byte> data;  // [rows, hidden]
  std::span<const float> scales;
};

inline PayloadRows RowsOf(std::span<const float> data) { return {Payload::kF32, std::as_bytes(data), {}}; }
inline PayloadRows RowsOf(std::span<const tensor::BF16> data) {
  return {Payload::kBf16, std::as_bytes(data), {}};
}

/// Returns whether rows of `from` may travel as `to`: equal payloads, f32 as any, bf16 as int8 or FP8.
bool CanEncode(Payload from, Payload to);

/// Encodes one row of kF32 or kBf16. For kInt8 and kF8E4M3 a block's scale is its largest magnitude divided
/// by 127 or 448, and 0 for a block of zeros; a block with an infinity or NaN decodes to NaN.
void EncodeRow(Payload from, const std::byte* row, int64_t hidden, Payload to, std::byte* wire);
/// Decodes a wire row to f32.
void DecodeRow(Payload payload, const std::byte* wire, int64_t hidden, float* row);

/// sum[i] = first ? 0 + weight * row[i] : sum[i] + weight * row[i], for kF32 and kBf16 rows. The product is
/// rounded to f32 before it is added, on every machine.
void AccumulateRow(Payload payload, const std::byte* row, int64_t hidden, float weight, bool first,
                   float* sum);

}  // namespace moesaic::comm
