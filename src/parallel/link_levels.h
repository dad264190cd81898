// Link levels and speeds of a topology for the planner of placements.
#pragma once

#include <vector>

#include "comm/topology/topology.h"
#include "parallel/placement/layer_cost.h"

namespace moesaic::parallel {

/// Returns the levels of a topology's links that connect equal groups of adjacent ranks, outermost first.
/// Levels of other shapes and of single ranks are left out.
std::vector<LinkLevel> LinkLevelsOf(const comm::Topology& topology);

/// Returns the relative speeds of the ranks by the arithmetic of their devices; the fastest is 1. Empty: the
/// file has no rates, or all are equal.
std::vector<double> SpeedsOf(const comm::Topology& topology);

}  // namespace moesaic::parallel
