// The scale that int8 activations have as a whole tensor, found before inference.
#pragma once

#include <limits>

namespace moesaic::tensor {

/// x = q * scale. The inverse is made with it, when a model is loaded, so that rounding multiplies,
/// q = round(x * inverse), and nothing is divided while the model runs.
struct StaticScale {
  float scale = 0;  // 0: none, every row finds its own (dynamic)
  float inverse = 0;

  /// Of a finite scale >= kLeast, so that the inverse is finite too; or of 0.
  static StaticScale Of(float scale) { return {scale, scale > 0 ? 1 / scale : 0}; }
  static constexpr float kLeast = 0x1p-126F;

  /// Whether it is finite, and so is its inverse.
  static bool HasInverse(float scale) {
    return scale >= kLeast && scale <= std::numeric_limits<float>::max();
  }
  /// A scale that was found as far as it has an inverse: the least one for what is less, but for 0.
  static float WithInverse(float scale) { return scale > 0 && scale < kLeast ? kLeast : scale; }

  bool is_set() const { return scale > 0; }
  bool operator==(const StaticScale&) const = default;
};

}  // namespace moesaic::tensor
