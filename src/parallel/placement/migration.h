// Moves of expert weights from one placement to another.
#pragma once

#include <vector>

#include "parallel/placement/placement.h"

namespace moesaic::parallel {

/// Weights of one expert that rank `to` receives into `slot`, from a rank that holds them now.
struct ExpertTransfer {
  int expert = 0, from = 0, to = 0, slot = 0;

  bool operator==(const ExpertTransfer&) const = default;
};

/// Transfers of one round. Every rank exchanges with one other rank at most: it sends at most one expert to
/// it and receives at most one from it.
using TransferRound = std::vector<ExpertTransfer>;

/// Reorders the slots of each rank of `next` so that experts that the rank already holds keep their slots as
/// far as `next` has them. Both have the same ranks.
LayerPlacement KeepSlots(const LayerPlacement& current, const LayerPlacement& next);

/// Plans the transfers that turn `current` into `next`, one for each expert that a rank of `next` holds and
/// the same rank of `current` does not. All transfers read `current`: receivers need a buffer for the weights
/// until the last round, and use `next` afterwards. Sources are holders whose ranks take part in few rounds.
/// The number of rounds is below twice the largest number of transfers that one rank sends and receives.
/// Deterministic. InvalidArgument if ranks differ, or if an expert of `next` has no holder in `current`.
StatusOr<std::vector<TransferRound>> PlanTransfers(const LayerPlacement& current, const LayerPlacement& next);

}  // namespace moesaic::parallel
