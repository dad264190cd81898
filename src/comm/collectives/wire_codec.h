// Lossy encodings of f32 messages between the children of a topology's root.
//
// kBf16: Each element is rounded to nearest even: |error| <= 2^-8 |x| for normal numbers.
//
// kInt8: Groups of 128 elements, counted from the start of the message, share a scale s >= max|x| / 127,
// rounded up to 16 significant bits: x = s * q, |error| <= s / 2 <= max|x| / 254 * (1 + 2^-15). A group whose
// largest magnitude is below 2^-100 becomes zero, and a group with an infinity or NaN becomes NaN. Magnitudes
// above 3.40e38 may overflow. A group is stored as its scale (f32) and then its q (int8).
//
// Encoding a decoded message again gives the same bytes, so forwarded messages do not lose more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "comm/collectives/plan.h"

namespace moesaic::comm {

inline constexpr int64_t kWireGroup = 128;  // elements per scale

/// Returns the bytes of a message of `count` elements of f32.
int64_t EncodedBytes(WireFormat wire, int64_t count);
/// `encoded` has EncodedBytes() of the number of values. The format is not kExact.
void Encode(WireFormat wire, std::span<const float> values, std::byte* encoded);
void Decode(WireFormat wire, const std::byte* encoded, std::span<float> values);
/// Replaces values by those that a receiver decodes.
void RoundToWire(WireFormat wire, std::span<float> values);

}  // namespace moesaic::comm
