// Rounds boxes around keys to the bytes of a summary, in plain arithmetic with the same bits on every
// machine, for ref/ and each instruction set. Everything is in an anonymous namespace on purpose (see
// impl_list.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/micro_kernels.h"

namespace moesaic::kernels {
namespace {

constexpr float kTiniest = 1e-30F;  // smaller values are replaced by this, whose inverse is still finite
constexpr float kLargest = 1e17F;   // keeps the sum of the squares of all dimensions finite

struct Box {
  alignas(64) float low[kMaxKeySummaryDim];
  alignas(64) float high[kMaxKeySummaryDim];
};

/// Rounds dimensions [begin, end) as part `part` of a summary, and stores the rounded centers in box->low.
/// Returns false if a bound is beyond kLargest or not a number.
inline bool RoundBox(int begin, int end, int part, Box* box, KeySummaryHeader* header, int8_t* centers,
                     uint8_t* radii) {
  float most = kTiniest;
  for (int d = begin; d < end; ++d) {
    if (!(-kLargest < box->low[d] && box->high[d] < kLargest)) return false;
    const float center = 0.5F * box->low[d] + 0.5F * box->high[d];
    const float magnitude = center < 0 ? -center : center;
    most = magnitude > most ? magnitude : most;
  }
  const float scale = most / 127, inverse = 127 / most;
  constexpr float kRound = 0x1.8p23F;  // adding it rounds to an integer
  float farthest = kTiniest;
  for (int d = begin; d < end; ++d) {
    const float middle = 0.5F * box->low[d] + 0.5F * box->high[d];
    const float rounded = (middle * inverse + kRound) - kRound;
    centers[d] = static_cast<int8_t>(static_cast<int32_t>(rounded));
    const float center = rounded * scale;
    const float above = box->high[d] - center, below = center - box->low[d];
    const float radius = above > below ? above : below;
    // The product and the difference each have an error of half a unit, 2^-24 relative.
    const float slack = (center < 0 ? -center : center) * 0x1p-23F;
    box->high[d] = radius * (1 + 0x1p-22F) + slack;
    box->low[d] = center;
    farthest = box->high[d] > farthest ? box->high[d] : farthest;
  }
  // A little more than 255 steps to the farthest key. Rounding up the number of steps by a relative 2^-21,
  // more than the error of three roundings, then leaves it at most 255.
  const float step = farthest / 255 * (1 + 0x1p-19F), steps = 1 / step;
  for (int d = begin; d < end; ++d) {
    const float count = box->high[d] * steps * (1 + 0x1p-21F);
    const auto whole = static_cast<int32_t>(count);
    radii[d] = static_cast<uint8_t>(whole + (static_cast<float>(whole) < count ? 1 : 0));
  }
  header->center_scale[part] = scale;
  header->radius_scale[part] = step;
  return true;
}

/// Marks the summary of a block with keys that are not finite.
inline void InvalidateKeySummary(int key_dim, KeySummaryHeader* header, int8_t* centers, uint8_t* radii) {
  for (int part = 0; part < 2; ++part) {
    header->center_scale[part] = __builtin_nanf("");
    header->radius_scale[part] = header->ball[part] = 0;
  }
  for (int d = 0; d < key_dim; ++d) centers[d] = 0;
  for (int d = 0; d < key_dim; ++d) radii[d] = 0;
}

}  // namespace
}  // namespace moesaic::kernels
