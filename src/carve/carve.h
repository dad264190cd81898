// `moesaic carve` converts the feed-forward networks of a dense Llama-like model into mixtures of experts.
//
// Each SwiGLU FFN is cut into equal slices of neurons:
// - The neurons with the largest mean output energy on calibration text become the shared expert.
// - The others become routed experts. They are clustered by the tokens that use them, then exchanged between
//   slices as long as this lowers the energy of the experts that the router leaves out.
// - The router is linear. Ridge regression fits it to each expert's log share of the energy; gradient steps
//   then lower the energy that it leaves out.
// - Least squares refits the down projection to the dense layer's output, on the activations of the carved
//   model.
//
// Nothing is backpropagated through the model. The result is deterministic on one instruction set; a plan
// (carve_plan.h) makes it nearly the same on all. Background: MoEfication (arXiv 2110.01786), CMoE
// (2502.04416).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "checkpoint/checkpoint.h"
#include "kernels/exec_context.h"
#include "kernels/kernel_table.h"
#include "runtime/thread_pool.h"

namespace moesaic::carve {

struct CarveOptions {
  int slices = 48;    ///< number of slices of an FFN; must divide its width
  int shared = 12;    ///< number of slices in the shared expert
  int active = 30;    ///< number of routed experts per token
  bool refit = true;  ///< false: weights are moved but not changed
  /// Ridge of the refit, which pulls towards the old weights; 0.05 to 0.1 work equally well.
  float ridge = 0.07F;
  /// Maximum number of calibration tokens; up to 2,048 one-token texts are added.
  int max_tokens = 98304;
  bool f32 = false;            ///< writes f32 instead of bf16
  std::string plan = {};       ///< file with experts and routers to use instead of a search
  std::string save_plan = {};  ///< file to write the used experts and routers to; empty: none
  /// Called after each layer; return false to stop.
  std::function<bool(int layer, int layers)> progress = {};
};

/// Results of carving one layer.
struct CarveLayerReport {
  double kept_energy = 0;   ///< mean share of a token's FFN energy in its active slices
  double error_before = 0;  ///< |dense - carved|^2 / |dense|^2 of the FFN's output before the refit
  double error_after = 0;   ///< the same after the refit
};

/// Carves `dense` and writes a Hub folder to `out`: config.json and model.safetensors. The architecture is
/// Glm4MoeForCausalLM, because its router and shared expert fit. The caller copies the tokenizer files. The
/// plan is written first. With `active` equal to the number of routed experts and no refit, the result
/// computes the dense model up to rounding.
StatusOr<std::vector<CarveLayerReport>> Carve(const checkpoint::Checkpoint& dense,
                                              const std::vector<std::vector<int32_t>>& calibration,
                                              const CarveOptions& options,
                                              const kernels::KernelTable& kernels, runtime::ThreadPool& pool,
                                              const std::string& out);

/// Returns one line that names everything the result depends on except the model, the calibration text and
/// the plan.
std::string CarveRecipe(const CarveOptions& options);

}  // namespace moesaic::carve
