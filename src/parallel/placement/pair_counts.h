// Replica counts for ranks of two slots: the best placement of given counts is known there, so that counts
// alone are searched.
#pragma once

#include <functional>
#include <span>
#include <vector>

namespace moesaic::parallel {

/// Load of one replica of an expert that has `copies` replicas.
using ReplicaSize = std::function<float(int expert, int copies)>;

/// Improves numbers of replicas that fill two slots on each of `ranks` ranks of equal speed. The largest
/// replica is best paired with the smallest one, the second largest with the second smallest, and so on (the
/// largest sum of any pairing is not smaller). Simulated annealing passes replicas from one expert to another
/// one, and minimises a high power of the pairs' sums. Returns the counts with the smallest largest sum:
/// `copies`, if no others are better. Experts keep one replica, and have one per rank at most. Deterministic
/// unless `stop` returns true early.
std::vector<int> SearchPairCounts(std::vector<int> copies, int ranks, const ReplicaSize& size, int tries,
                                  const std::function<bool()>& stop);

}  // namespace moesaic::parallel
