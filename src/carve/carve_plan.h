// A carve plan: the assignment of neurons to experts, and the routers. The search branches on rounded values,
// so two instruction sets find plans of different quality. Given one plan, they make nearly the same model.
#pragma once

#include <string>
#include <vector>

#include "carve/carve.h"
#include "carve/router_fit.h"
#include "models/decoder_spec.h"

namespace moesaic::carve {

/// The plan of one FFN. Neurons are rows of gate and up, and columns of down.
struct LayerPlan {
  std::vector<int> shared;                // neurons of the shared expert, ascending
  std::vector<std::vector<int>> experts;  // [routed][slice] neurons, ascending
  LinearRouter router;
};

/// Reads a file of WriteCarvePlan. Fails unless its slices, shared and active experts are those of `options`
/// and its shapes are those of `spec`. It cannot tell models of the same shape apart.
StatusOr<std::vector<LayerPlan>> ReadCarvePlan(const std::string& path, const models::DecoderSpec& spec,
                                               const CarveOptions& options);

/// Writes a safetensors file with these tensors:
/// - "options" (I32 [3]): slices, shared, active;
/// - "layers.N.expert" (I32 [width]): the expert of each neuron, -1 for the shared one;
/// - "layers.N.router.weight" (F32 [routed, hidden]) and "layers.N.router.bias" (F32 [routed]).
Status WriteCarvePlan(const std::string& path, const CarveOptions& options,
                      const std::vector<LayerPlan>& plans);

}  // namespace moesaic::carve
