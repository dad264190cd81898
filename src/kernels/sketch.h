// Sketches of the keys of a block, behind the box in its digest (SketchLayout in micro_kernels.h): which
// block holds the one key that a query looks for. After RaBitQ (arXiv 2405.12497): the difference of a key to
// the block's center is rotated at random, so that its signs tell its direction; the estimate of a product
// with it is without bias.
#pragma once

#include <cstdint>

#include "kernels/micro_kernels.h"

namespace moesaic::kernels {

/// Rises with what digests say, so that those made otherwise are not taken for these.
inline constexpr int kDigestVersion = 2;

/// Signs of a key's part of so many dimensions.
constexpr int SketchWidth(int dim) { return (dim + 63) / 64 * 64 * (dim <= 64 ? 2 : 1); }

/// Of keys whose second part, if any, begins at key_split.
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
constexpr int64_t DigestBytes(int key_dim, int key_split, bool sketches) {
  return sketches ? SketchLayoutOf(key_dim, key_split).bytes : BoxBytes(key_dim);
}

/// Makes the sketches of a digest whose box was made. The same bits on every machine.
void MakeSketches(const DigestTask& task);

/// Rotates a query [key_dim], already scaled, and rounds it to `out` [the widths' sum], whose parts are to be
/// multiplied by scales [2] and have the sums [2]. A query that is not finite becomes zeros.
void SketchQuery(const float* q, int key_dim, int key_split, int8_t* out, float* scales, int32_t* sums);

}  // namespace moesaic::kernels
