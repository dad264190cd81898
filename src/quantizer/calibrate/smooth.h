// SmoothQuant (Xiao et al. 2022): moving the size of outlier channels from activations, which have one scale
// for all of them, into the weights, whose scales can bear it.
//
//   s[j] = max|X[:, j]|^alpha / max|W[:, j]|^(1 - alpha)        X / s and W * s: the product stays as it was
//
// What divides X must be folded into what makes it. These pairs allow that:
//   a norm, and all linears that read it (of a MoE layer's: the router, every expert's gate and up)
//   MLA's q_a_layernorm and q_b_proj; kv_a_layernorm and kv_b_proj
//   an expert's up_proj and its down_proj: the rows of up are divided (silu(gate) * up is linear in up)
#pragma once

#include <span>
#include <vector>

#include "base/status.h"
#include "kernels/ops.h"
#include "quantizer/calibrate/output_error.h"
#include "quantizer/format/grid.h"

namespace moesaic::quantizer {

struct SmoothOptions {
  Grid grid;  // of the weights
  /// true: one activation scale for the tensor, from the inputs' largest magnitudes; false: one a token.
  bool static_activations = true;
  /// Rounds every s to a power of two: then folding changes no bit of what the model computes in f32 or bf16,
  /// nor of a router that reads the same norm.
  bool powers_of_two = false;
};

struct Smoothing {
  float alpha = 0;            // of `scales`; 0: none is best, and they are all 1
  std::vector<float> scales;  // s [k], positive
  double loss = 0;            // squared error of the outputs with int8 activations and rounded weights,
  double loss_without = 0;    // and that without smoothing; both relative to the outputs' squares
};

/// The scales of one alpha, at least 1e-5 and divided by their geometric mean, so that what is folded keeps
/// its size. Inputs that are 0 in activations or weights have 1.
std::vector<float> SmoothScales(std::span<const float> activation_largest,
                                std::span<const float> weight_largest, float alpha, bool powers_of_two);

/// Tries alphas .3, .4, ... .95 and none at all on tokens x [count, k] and takes the one whose outputs, with
/// weights and activations rounded, are nearest to the unrounded ones. `largest` [k]: of the inputs over all
/// calibration tokens, of which x are some. Linears that stay unrounded (a router) shape no loss and are left
/// out of `linears`; they must be folded all the same. Of wide matrices some hundred outputs are looked at.
StatusOr<Smoothing> SearchSmoothing(const kernels::ExecContext& ctx, const TokenSample& x,
                                    std::span<const float> largest, std::span<const WeightRows> linears,
                                    const SmoothOptions& options);

/// Folds the inputs of W [n, k]: times s[k]. Folding (folding.h) does so for the parts of a model.
void MultiplyInputs(const kernels::ExecContext& ctx, std::span<const float> scales, int n, float* rows);

}  // namespace moesaic::quantizer
