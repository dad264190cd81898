// Experts that each rank holds, per layer.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "parallel/placement/eplb.h"
#include "parallel/placement/load_matrix.h"

namespace moesaic::parallel {

/// Experts of one layer in the slots of each rank. Slots of a rank may differ in number between ranks.
using LayerPlacement = std::vector<std::vector<int>>;  // [ranks][slots of the rank]

/// Placement of all layers.
struct Placement {
  int experts = 0;
  std::vector<LayerPlacement> layers = {};

  int ranks() const { return layers.empty() ? 0 : static_cast<int>(layers.front().size()); }
  /// Largest number of slots of a rank over all layers.
  int max_slots() const;
  /// Returns the number of replicas of a layer over all ranks.
  int replicas(int layer) const;
};

/// Returns InvalidArgument unless every layer has the same ranks, every expert has a replica and experts are
/// in range. `distinct` also refuses two replicas of one expert on a rank.
Status CheckPlacement(const Placement& placement, const std::string& source, bool distinct);

/// Returns the number of replicas of each expert.
std::vector<int> CopiesOf(const LayerPlacement& layer, int experts);

/// Returns `layer` without the experts of dead ranks. `dead` is [ranks]; empty: all ranks live.
LayerPlacement LivingPart(LayerPlacement layer, const std::vector<bool>& dead);

/// Returns the number of slots that repeat an expert of their rank.
int DuplicateSlots(const LayerPlacement& layer);

/// Returns the placement of an EPLB plan: slot s is on rank s / (replicas / ranks).
Placement FromEplb(const EplbPlan& plan, int ranks);

/// Returns InvalidArgument unless all ranks and layers have equally many slots.
Status CheckEqualSlots(const Placement& placement);

/// Returns arrays of the form that EPLB returns. InvalidArgument: ranks or layers differ in their number of
/// slots, or `log2phy` is above kMaxLoadValues.
StatusOr<EplbPlan> ToEplb(const Placement& placement);

/// Fills the slots of ranks, [ranks], that are empty in `placement`: each rank gets further replicas of those
/// experts that it does not hold and whose replicas have the largest loads. Slots of a rank that holds all
/// experts stay empty. `loads` has the layers of the placement, and `slots` its ranks. Returns the largest
/// number of added replicas of a layer.
int FillSlots(const LoadMatrix& loads, std::span<const int> slots, Placement* placement);

/// Returns experts in order, divided evenly among ranks up to one: the default placement of engines.
LayerPlacement InOrder(int experts, int ranks);

}  // namespace moesaic::parallel
