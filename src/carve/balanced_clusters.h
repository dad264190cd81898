// Groups the neurons of a dense FFN into clusters of equal size, one for each expert.
#pragma once

#include <vector>

#include "carve/least_squares.h"

namespace moesaic::carve {

/// Assigns each row of `features` [items, dims] to one of `clusters` clusters. Each cluster gets exactly
/// items / clusters rows, so `clusters` must divide the number of items. Runs spherical k-means, so rows of a
/// cluster point in similar directions. The assignment step takes (item, cluster) pairs in order of
/// similarity while the cluster has room. Deterministic.
std::vector<int> BalancedClusters(runtime::ThreadPool& pool, RowMatrix features, int clusters,
                                  int iterations);

}  // namespace moesaic::carve
