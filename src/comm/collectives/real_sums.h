// Sums of real numbers over ranks, and the error that lossy encodings may add to them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "comm/collectives/plan.h"
#include "comm/collectives/rank_tree.h"

namespace moesaic::comm {

/// Sums in f64 of a range of a vector, for plans that encode messages between the children of a tree.
class RealSums {
 public:
  /// Element i of a rank's vector is value(rank, i), of at most 1 in magnitude. The tree has two ranks or
  /// more.
  RealSums(const RankTree& tree, int64_t first, int64_t count,
           const std::function<float(int rank, int64_t index)>& value);

  /// Sum of element first + i.
  double At(size_t i) const { return sums_[i]; }
  /// Bound of rule C12 (docs/contracts/comm.md) for the error of element first + i, with the roundings of
  /// f32. `rounds_result` is true for an AllReduce. `wire` is not kExact.
  double BoundAt(size_t i, WireFormat wire, bool rounds_result) const;

 private:
  std::vector<std::vector<double>> partials_;  // [children][count]
  std::vector<double> sums_;                   // [count]
  std::vector<double> largest_;                // magnitude of each child's partial sums
  double largest_sum_ = 0;
  double rounding_ = 0;
};

}  // namespace moesaic::comm
