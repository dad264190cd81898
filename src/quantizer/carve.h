// `moesaic carve`: turns the feed-forward networks of a dense Llama-like model into mixtures of experts.
//
// Each SwiGLU FFN is cut into equal slices of neurons. The slices that carry most of the output's energy on
// calibration text become the shared expert; the others, clustered by which tokens use them, become routed
// experts. A linear router is fitted in closed form (ridge regression of each expert's log share of the
// energy), and the down projection is refitted by least squares to the dense layer's output on the carved
// model's own activations. No gradient is taken and the result is deterministic. Background: MoEfication
// (arXiv 2110.01786), CMoE (2502.04416).
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "checkpoint/checkpoint.h"
#include "kernels/kernel_table.h"
#include "runtime/thread_pool.h"

namespace moesaic::quantizer {

struct CarveOptions {
  int slices = 24;         ///< pieces an FFN is cut into; must divide its width
  int shared = 6;          ///< slices of the shared expert
  int active = 15;         ///< routed experts a token
  bool refit = true;       ///< false: weights are moved, not changed
  float ridge = 0.03F;     ///< pull of the refit towards the old weights
  int max_tokens = 65536;  ///< of calibration
  bool f32 = false;        ///< write f32 instead of bf16
  /// Called after each layer; return false to stop.
  std::function<bool(int layer, int layers)> progress;
};

/// What carving one layer did.
struct CarveLayerReport {
  double kept_energy = 0;   ///< mean share of a token's FFN energy in its active slices
  double error_before = 0;  ///< |dense - carved|^2 / |dense|^2 of the FFN's output before the refit
  double error_after = 0;   ///< and after it
};

/// Token ids of calibration, [sequences][length], from the tensor "tokens" (I32) of a safetensors file.
StatusOr<std::vector<std::vector<int32_t>>> ReadCalibration(const std::string& path, int vocab,
                                                            int max_tokens);

/// Carves `dense` and writes a Hub folder to `out`: config.json (Glm4MoeForCausalLM, whose router and shared
/// expert fit), model.safetensors. Tokenizer files are the caller's. With `active` equal to all routed
/// experts and no refit, the result computes the dense model up to rounding.
StatusOr<std::vector<CarveLayerReport>> Carve(const checkpoint::Checkpoint& dense,
                                              const std::vector<std::vector<int32_t>>& calibration,
                                              const CarveOptions& options,
                                              const kernels::KernelTable& kernels, runtime::ThreadPool& pool,
                                              const std::string& out);

/// One line that names everything the result depends on beside the model and the calibration text.
std::string CarveRecipe(const CarveOptions& options);

}  // namespace moesaic::quantizer
