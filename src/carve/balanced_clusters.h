// Clusters of equal size: which neurons of a dense FFN become one expert.
#pragma once

#include <vector>

#include "carve/least_squares.h"

namespace moesaic::carve {

/// Assigns each row of `features` [items, dims] to one of `clusters` clusters of items / clusters rows each
/// (items must divide), so that rows of a cluster point in like directions: spherical k-means whose
/// assignment takes the best (item, cluster) pairs first, as long as there is room. Deterministic.
std::vector<int> BalancedClusters(runtime::ThreadPool& pool, RowMatrix features, int clusters,
                                  int iterations);

}  // namespace moesaic::carve
