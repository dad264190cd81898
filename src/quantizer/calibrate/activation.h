// Scales of int8 activations: one for a whole tensor, fixed before inference (static), or one for each token,
// found while it runs (dynamic); and the choice between them by what they do to a layer's outputs.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/ops.h"
#include "quantizer/calibrate/output_error.h"

namespace moesaic::quantizer {

/// How the static scale of a tensor comes from what calibration has seen.
enum class RangeRule : uint8_t {
  kLargest,       ///< the largest magnitude / 127
  kPercentile,    ///< what 99.99% of the magnitudes are not above / 127
  kSquaredError,  ///< the scale of least expected squared error, rounding and clipping together
};

/// Magnitudes of a layer's inputs over the calibration tokens: the largest of each input, and how many there
/// are of each size. Counts do not depend on the order of tokens or on threads.
class ActivationRange {
 public:
  explicit ActivationRange(int k);
  /// Adds tokens. `divisors` [k] or empty: what smoothing divides each input by. Values must be finite.
  void Add(const kernels::ExecContext& ctx, const TokenSample& x, std::span<const float> divisors);
  std::span<const float> largest() const { return largest_; }  ///< [k]
  /// x = q * scale with q in [-127, 127]; 1 where all inputs were 0, never below StaticScale::kLeast.
  float Scale(RangeRule rule) const;

 private:
  std::vector<float> largest_;
  std::vector<int64_t> counts_;  // by size, in 32nds of an octave
  int64_t zeros_ = 0;
};

/// Tokens as int8 makes them: q * scale with q in [-127, 127], round_half_even(x * (1 / scale)) as kernels
/// round with a static scale. scale 0: each token's own, largest / 127, and round_half_even(x / scale).
std::vector<float> RoundActivations(const kernels::ExecContext& ctx, const TokenSample& x, float scale);

struct ActivationChoice {
  bool is_static = false;
  double static_loss = 0, dynamic_loss = 0;  // squared errors of the outputs, relative to their squares
};

/// Takes the static scale for linears that share tokens x if the outputs' error is at most `most` times that
/// of dynamic scales, with weights as they were rounded; else dynamic ones.
ActivationChoice ChooseActivations(const kernels::ExecContext& ctx, const TokenSample& x,
                                   std::span<const WeightRows> weights, std::span<const WeightRows> rounded,
                                   float static_scale, double most);

}  // namespace moesaic::quantizer
