// Measures of a placement under a load.
#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "parallel/placement/placement.h"

namespace moesaic::parallel {

/// Returns the load of each rank if every replica of an expert takes an equal share.
std::vector<double> EqualShareLoads(const LayerPlacement& layer, std::span<const double> loads);

/// Returns the largest load / speed of a rank over the mean, with equal shares; 1 is perfect balance. Empty
/// `speeds`: all equal.
double Imbalance(const LayerPlacement& layer, std::span<const double> loads,
                 std::span<const double> speeds = {});
/// The same with the exact split over replicas.
double SplitImbalance(const LayerPlacement& layer, std::span<const double> loads,
                      std::span<const double> speeds = {});
/// The same after at most `moves` experts of the layer moved (PlanSpill). `moved` counts them.
double SpillImbalance(const LayerPlacement& layer, std::span<const double> loads, int moves, int& moved,
                      std::span<const double> speeds = {});

/// Returns METRO's objective (arXiv 2512.09277): the maximum number of activated experts on a rank. Each
/// expert with tokens is computed on one of its ranks, chosen to make this maximum small. Decoding reads the
/// weights of each such expert once.
int ActivatedExperts(const LayerPlacement& layer, std::span<const double> loads);

}  // namespace moesaic::parallel
