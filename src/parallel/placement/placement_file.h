// Files of placements: ours and those of other engines.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"
#include "parallel/placement/placement.h"

namespace moesaic::parallel {

enum class PlacementFormat {
  kMoesaic,   ///< JSON: "experts" and "layers" [layers][ranks][slots]; the only format for unequal slots
  kEplb,      ///< .npz with phy2log, log2phy and logcnt as EPLB returns them
  kSglang,    ///< JSON of `--init-expert-location`: "physical_to_logical_map" [layers][slots]
  kOmni,      ///< .npy of OmniPlacement: int32 0 or 1, [ranks, layers, experts]
  kTensorRt,  ///< YAML of TensorRT-LLM's load balancer
};

/// Text of a file. InvalidArgument if the format can't hold the placement. TensorRT-LLM counts the dense
/// layers before the first MoE layer: `first_layer` is the number of that layer.
StatusOr<std::string> PlacementBytes(const Placement& placement, PlacementFormat format, int first_layer = 0);

/// The .npz file of an EPLB plan, with the order of replicas that EPLB returns.
std::string EplbBytes(const EplbPlan& plan);

/// Parses a file of any format, by its content. `ranks` tells how many ranks share the slots of the files of
/// EPLB, SGLang and TensorRT-LLM, which do not name it; 0 is an error for them. Other formats must have
/// `ranks` ranks unless it is 0.
StatusOr<Placement> ParsePlacement(std::string_view bytes, const std::string& source, int ranks);
/// Reads a file for ParsePlacement().
StatusOr<Placement> ReadPlacement(const std::string& path, int ranks);

}  // namespace moesaic::parallel
