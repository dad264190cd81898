// Files of placements in the formats of this program and of other engines.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"
#include "parallel/placement/placement.h"

namespace moesaic::parallel {

enum class PlacementFormat {
  kMoesaic,   ///< JSON: "experts" and "layers" [layers][ranks][slots]; the only format for unequal slots
  kEplb,      ///< .npz with phy2log, log2phy and logcnt as EPLB returns them
  kSglang,    ///< JSON of `--init-expert-location`: "physical_to_logical_map" [decoder layers][slots]
  kOmni,      ///< .npy of OmniPlacement: int32 0 or 1, [ranks, layers, experts]
  kTensorRt,  ///< YAML of TensorRT-LLM's load balancer
};

/// Returns whether layers of the format are decoder layers, the dense ones included.
constexpr bool CountsDenseLayers(PlacementFormat format) {
  return format == PlacementFormat::kSglang || format == PlacementFormat::kTensorRt;
}

/// Returns whether the format has equally many slots on all ranks and layers, none of which is empty.
constexpr bool NeedsEqualSlots(PlacementFormat format) {
  return format != PlacementFormat::kMoesaic && format != PlacementFormat::kOmni;
}

/// Returns the bytes of a file. InvalidArgument: the format can't hold the placement. `first_layer` is the
/// number of the first MoE layer; it must be 0 unless CountsDenseLayers().
StatusOr<std::string> PlacementBytes(const Placement& placement, PlacementFormat format, int first_layer = 0);

/// Returns the .npz file of an EPLB plan, with the order of replicas that EPLB returns.
std::string EplbBytes(const EplbPlan& plan);

/// Parses a file of any format, which is detected by its content. `ranks` is the number of ranks that share
/// the slots; 0: it is that of the file. Files of EPLB, SGLang and TensorRT-LLM do not have this number, so 0
/// is an error for them. Other files must have `ranks` ranks.
StatusOr<Placement> ParsePlacement(std::string_view bytes, const std::string& source, int ranks);
/// Reads a file for ParsePlacement().
StatusOr<Placement> ReadPlacement(const std::string& path, int ranks);

}  // namespace moesaic::parallel
