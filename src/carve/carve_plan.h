// What carving searches for: which neurons make an expert, and the router. The search branches on roundings,
// so that two instruction sets find plans of unlike quality; from one plan they make nearly the same model.
#pragma once

#include <string>
#include <vector>

#include "carve/carve.h"
#include "carve/router_fit.h"
#include "models/decoder_spec.h"

namespace moesaic::carve {

/// One FFN's cut. Neurons are rows of gate and up and columns of down.
struct LayerPlan {
  std::vector<int> shared;                // neurons of the shared expert, ascending
  std::vector<std::vector<int>> experts;  // [routed][slice] neurons, ascending
  LinearRouter router;
};

/// Reads what WriteCarvePlan wrote. It must be for the slices, shared and active ones of `options` and fit
/// `spec`; from which model of that shape it is, it doesn't know.
StatusOr<std::vector<LayerPlan>> ReadCarvePlan(const std::string& path, const models::DecoderSpec& spec,
                                               const CarveOptions& options);

/// A safetensors file with "options" (I32 [3]: slices, shared, active) and, a layer, "layers.N.expert" (I32
/// [width]: each neuron's expert, -1 for the shared one), "layers.N.router.weight" (F32 [routed, hidden]) and
/// "layers.N.router.bias" (F32 [routed]).
Status WriteCarvePlan(const std::string& path, const CarveOptions& options,
                      const std::vector<LayerPlan>& plans);

}  // namespace moesaic::carve
