// The scale that int8 activations have as a whole tensor, found before inference.
#pragma once

namespace moesaic::tensor {

/// x = q * scale. The inverse is made with it, when a model is loaded, so that rounding multiplies,
/// q = round(x * inverse), and nothing is divided while the model runs.
struct StaticScale {
  float scale = 0;  // 0: none, every row finds its own (dynamic)
  float inverse = 0;

  /// Of a finite scale >= kLeast, so that the inverse is finite too; or of 0.
  static StaticScale Of(float scale) { return {scale, scale > 0 ? 1 / scale : 0}; }
  static constexpr float kLeast = 0x1p-126F;

  bool is_set() const { return scale > 0; }
  bool operator==(const StaticScale&) const = default;
};

}  // namespace moesaic::tensor
