// Link levels and speeds of a topology for the planner of placements.
#pragma once

#include <vector>

#include "comm/topology/topology.h"
#include "parallel/placement/layer_cost.h"

namespace moesaic::parallel {

/// The levels of a topology's links that connect equal groups of adjacent ranks, outermost first. Levels of
/// other shapes are left out, and so are those of single ranks.
std::vector<LinkLevel> LinkLevelsOf(const comm::Topology& topology);

/// Relative speeds of the ranks by the arithmetic of their devices, the fastest is 1. Empty: the file has no
/// rates, or all are equal.
std::vector<double> SpeedsOf(const comm::Topology& topology);

}  // namespace moesaic::parallel
