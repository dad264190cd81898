// `moesaic carve`: turns the feed-forward networks of a dense Llama-like model into mixtures of experts.
//
// Each SwiGLU FFN is cut into equal slices of neurons. The neurons that carry most of the output's energy on
// calibration text become the shared expert; the others become routed experts: clustered by which tokens use
// them, then exchanged between slices as long as that lowers the energy which the router leaves out. The
// router is linear (ridge regression of each expert's log share of the energy, then some steps down the
// energy left out), and the down projection is refitted by least squares to the dense layer's output on the
// carved model's own activations. Nothing is propagated through the model backwards, and the result is
// deterministic on a given instruction set; a plan (carve_plan.h) makes it nearly the same on all.
// Background: MoEfication (arXiv 2110.01786), CMoE (2502.04416).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "checkpoint/checkpoint.h"
#include "kernels/kernel_table.h"
#include "runtime/thread_pool.h"

namespace moesaic::carve {

struct CarveOptions {
  int slices = 48;             ///< pieces an FFN is cut into; must divide its width
  int shared = 12;             ///< slices of the shared expert
  int active = 30;             ///< routed experts a token
  bool refit = true;           ///< false: weights are moved, not changed
  float ridge = 0.07F;         ///< pull of the refit towards the old weights; 0.05 to 0.1 serve alike
  int max_tokens = 98304;      ///< of the calibration text; up to 2,048 texts of one token come on top
  bool f32 = false;            ///< write f32 instead of bf16
  std::string plan = {};       ///< a file with experts and routers, taken instead of searching for them
  std::string save_plan = {};  ///< where to write those that were used; empty: nowhere
  /// Called after each layer; return false to stop.
  std::function<bool(int layer, int layers)> progress = {};
};

/// What carving one layer did.
struct CarveLayerReport {
  double kept_energy = 0;   ///< mean share of a token's FFN energy in its active slices
  double error_before = 0;  ///< |dense - carved|^2 / |dense|^2 of the FFN's output before the refit
  double error_after = 0;   ///< and after it
};

/// Carves `dense` and writes a Hub folder to `out`: config.json (Glm4MoeForCausalLM, whose router and shared
/// expert fit), model.safetensors. Tokenizer files are the caller's. The plan is written before them. With
/// `active` equal to all routed experts and no refit, the result computes the dense model up to rounding.
StatusOr<std::vector<CarveLayerReport>> Carve(const checkpoint::Checkpoint& dense,
                                              const std::vector<std::vector<int32_t>>& calibration,
                                              const CarveOptions& options,
                                              const kernels::KernelTable& kernels, runtime::ThreadPool& pool,
                                              const std::string& out);

/// One line that names everything the result depends on beside the model, the calibration text and the plan.
std::string CarveRecipe(const CarveOptions& options);

}  // namespace moesaic::carve
