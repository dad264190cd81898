// Scales of int8 activations. A static scale is fixed before inference for a whole tensor; dynamic scales are
// computed for each token at run time. ChooseActivations selects between them by the error of a layer's
// outputs.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/exec_context.h"
#include "quantizer/calibrate/output_error.h"
#include "tensor/static_scale.h"

namespace moesaic::quantizer {

/// Rule that derives a tensor's static scale from calibration.
enum class RangeRule : uint8_t {
  kLargest,       ///< the largest magnitude / 127
  kPercentile,    ///< the magnitude that 99.99% of the values do not exceed / 127
  kSquaredError,  ///< the scale of least expected squared error of rounding and clipping
};

/// Statistics of a layer's inputs over the calibration tokens: the largest magnitude of each input, and a
/// histogram of magnitudes. They do not depend on the order of tokens or on threads.
class ActivationRange {
 public:
  explicit ActivationRange(int k);
  /// Adds tokens. `divisors` [k] or empty: smoothing divisors of the inputs. Values must be finite.
  void Add(const kernels::ExecContext& ctx, const TokenSample& x, std::span<const float> divisors);
  std::span<const float> largest() const { return largest_; }  ///< [k]
  /// Returns the scale in x = q * scale with q in [-127, 127]. It is 1 if all inputs were 0, and at least
  /// StaticScale::kMin.
  float Scale(RangeRule rule) const;

 private:
  std::vector<float> largest_;
  std::vector<int64_t> counts_;  // histogram with 32 bins per octave
  int64_t zeros_ = 0;
};

/// Returns tokens after int8 rounding: q * scale with q in [-127, 127]. A static scale rounds as the kernels
/// do, round_half_even(x * (1 / scale)). With scale 0 each token has its own, largest / 127, and rounds to
/// round_half_even(x / scale).
std::vector<float> RoundActivations(const kernels::ExecContext& ctx, const TokenSample& x, float scale);

struct ActivationChoice {
  bool is_static = false;
  double static_loss = 0, dynamic_loss = 0;  // squared errors of the outputs, relative to their squares
};

/// Selects between scales for linears that share tokens x, with rounded weights. Takes the static scale if
/// the error of the outputs is at most `most` times that of dynamic scales.
ActivationChoice ChooseActivations(const kernels::ExecContext& ctx, const TokenSample& x,
                                   std::span<const WeightRows> weights, std::span<const WeightRows> rounded,
                                   float static_scale, double most);

}  // namespace moesaic::quantizer
