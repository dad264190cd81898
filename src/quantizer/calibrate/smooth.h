// SmoothQuant (Xiao et al. 2022) moves the magnitude of outlier channels from activations, which have one
// scale for all channels, into the weights, whose scales can absorb it.
//
//   s[j] = max|X[:, j]|^alpha / max|W[:, j]|^(1 - alpha)        X / s and W * s: the product is unchanged
//
// The divisor of X must be folded into the module that produces X. These pairs allow that:
// - a norm, and all linears that read it (in a MoE layer: the router, and every expert's gate and up);
// - MLA's q_a_layernorm and q_b_proj; kv_a_layernorm and kv_b_proj;
// - an expert's up_proj and its down_proj: the rows of up are divided (silu(gate) * up is linear in up).
#pragma once

#include <span>
#include <vector>

#include "base/status.h"
#include "kernels/exec_context.h"
#include "quantizer/calibrate/output_error.h"
#include "quantizer/format/grid.h"

namespace moesaic::quantizer {

struct SmoothOptions {
  Grid grid;  // grid of the weights
  /// true: one activation scale for the tensor, from the inputs' largest magnitudes. false: one per token.
  bool static_activations = true;
  /// Rounds every s to a power of two. Folding then changes no bit of the model in f32 or bf16, nor of a
  /// router that reads the same norm.
  bool powers_of_two = false;
};

struct Smoothing {
  float alpha = 0;            // alpha of `scales`; 0: no smoothing, all scales are 1
  std::vector<float> scales;  // s [k], positive
  double loss = 0;            // squared error of the outputs with int8 activations and rounded weights
  double loss_without = 0;    // the same without smoothing; both relative to the outputs' squares
};

/// Returns the scales of one alpha: at least 1e-5, divided by their geometric mean so that the folded weights
/// keep their size. Inputs that are 0 in activations or weights have scale 1.
std::vector<float> SmoothScales(std::span<const float> activation_largest,
                                std::span<const float> weight_largest, float alpha, bool powers_of_two);

/// Tries alphas .3, .4, ... .95 and none on tokens x [count, k]. Selects the one whose outputs, with rounded
/// weights and activations, are nearest to the unrounded ones. `largest` [k] are the inputs' maxima over all
/// calibration tokens. `linears` excludes linears that stay unrounded (a router); they must be folded all the
/// same. For wide matrices some hundred outputs are sampled.
StatusOr<Smoothing> SearchSmoothing(const kernels::ExecContext& ctx, const TokenSample& x,
                                    std::span<const float> largest, std::span<const WeightRows> linears,
                                    const SmoothOptions& options);

/// Multiplies the inputs of W [n, k] by s[k]. Folding (folding.h) does so for the parts of a model.
void MultiplyInputs(const kernels::ExecContext& ctx, std::span<const float> scales, int n, float* rows);

}  // namespace moesaic::quantizer
