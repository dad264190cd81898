// Sketches of the keys of a block, stored after the box of its summary (SketchLayout in micro_kernels.h).
// They tell which block holds the one key that a query looks for. The method follows RaBitQ (arXiv
// 2405.12497): the difference of a key from the block's center is rotated at random, and its signs encode its
// direction. The estimate of a product with it is unbiased.
#pragma once

#include <cstdint>

#include "kernels/micro_kernels.h"

namespace moesaic::kernels {

/// Version of the summaries' contents. It must be increased when they change, so that stored ones are not
/// mixed.
inline constexpr int kKeySummaryVersion = 2;

/// Returns the sign bits of a key's part with `dim` dimensions.
constexpr int SketchWidth(int dim) { return (dim + 63) / 64 * 64 * (dim <= 64 ? 2 : 1); }

/// Returns the layout for keys whose second part, if any, begins at key_split.
constexpr SketchLayout SketchLayoutOf(int key_dim, int key_split) {
  const int rest = key_dim - key_split;
  SketchLayout layout = {.width = {SketchWidth(key_split), rest > 0 ? SketchWidth(rest) : 0},
                         .factors = BoxBytes(key_dim),
                         .planes = 0,
                         .bytes = 0};
  layout.planes = (layout.factors + (rest > 0 ? 128 : 64) + 63) / 64 * 64;
  layout.bytes = layout.planes + (layout.width[0] + layout.width[1]) / 64 * kSketchStepBytes;
  return layout;
}
constexpr int64_t KeySummaryBytes(int key_dim, int key_split, bool sketches) {
  return sketches ? SketchLayoutOf(key_dim, key_split).bytes : BoxBytes(key_dim);
}

/// Adds sketches to a summary whose box is complete. The bits are the same on every machine.
void MakeSketches(const KeySummaryTask& task);

/// Rotates a query [key_dim], already scaled, and quantizes it to `out` [sum of the widths]. Writes the
/// parts' scales [2] and the sums of their elements [2]. A query that is not finite becomes zeros.
void SketchQuery(const float* q, int key_dim, int key_split, int8_t* out, float* scales, int32_t* sums);

}  // namespace moesaic::kernels
