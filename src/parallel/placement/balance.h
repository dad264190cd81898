// Measures of a placement under a load.
#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "parallel/placement/placement.h"

namespace moesaic::parallel {

/// Load of each rank when every replica of an expert takes an equal share.
std::vector<double> EqualShareLoads(const LayerPlacement& layer, std::span<const double> loads);

/// Largest load / speed over the mean, i.e. 1 for perfect balance; equal shares. Empty speeds are equal
/// speeds.
double Imbalance(const LayerPlacement& layer, std::span<const double> loads,
                 std::span<const double> speeds = {});
/// The same with the exact split over replicas.
double SplitImbalance(const LayerPlacement& layer, std::span<const double> loads,
                      std::span<const double> speeds = {});
/// The same after at most `moves` experts of the layer moved (PlanSpill). `moved` counts them.
double SpillImbalance(const LayerPlacement& layer, std::span<const double> loads, int moves, int& moved,
                      std::span<const double> speeds = {});

/// METRO's objective (arXiv 2512.09277): the most experts with tokens on one rank when each expert with
/// tokens is computed on one of its ranks, chosen to make that number small. Decoding reads each such
/// expert's weights once.
int ActivatedExperts(const LayerPlacement& layer, std::span<const double> loads);

}  // namespace moesaic::parallel
