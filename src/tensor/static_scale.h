// Per-tensor scale of int8 activations, calibrated before inference.
#pragma once

#include <limits>

namespace moesaic::tensor {

/// x = q * scale. The inverse is computed when a model is loaded, so that quantization multiplies, q =
/// round(x * inverse), and inference does not divide.
struct StaticScale {
  float scale = 0;  // 0: none; each row computes its own scale (dynamic)
  float inverse = 0;

  /// `scale` must be 0, or finite and >= kMin so that the inverse is finite too.
  static StaticScale Of(float scale) { return {scale, scale > 0 ? 1 / scale : 0}; }
  static constexpr float kMin = 0x1p-126F;

  /// Returns whether `scale` and its inverse are finite.
  static bool HasInverse(float scale) { return scale >= kMin && scale <= std::numeric_limits<float>::max(); }
  /// Raises a calibrated scale in (0, kMin) to kMin, so that it has an inverse; leaves 0 and other values
  /// unchanged.
  static float WithInverse(float scale) { return scale > 0 && scale < kMin ? kMin : scale; }

  bool is_set() const { return scale > 0; }
  bool operator==(const StaticScale&) const = default;
};

}  // namespace moesaic::tensor
