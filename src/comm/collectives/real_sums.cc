#include "comm/collectives/real_sums.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace moesaic::comm {
namespace {

double LargestMagnitude(const std::vector<double>& values) {
  double largest = 0;
  for (const double value : values) largest = std::max(largest, std::fabs(value));
  return largest;
}

}  // namespace

RealSums::RealSums(const RankTree& tree, int64_t first, int64_t count,
                   const std::function<float(int rank, int64_t index)>& value)
    : sums_(static_cast<size_t>(count)) {
  for (const RankTree& child : tree.children) {
    std::vector<double>& partial = partials_.emplace_back(sums_.size());
    for (const int rank : child.ranks) {
      for (size_t i = 0; i < sums_.size(); ++i) {
        partial[i] += static_cast<double>(value(rank, first + static_cast<int64_t>(i)));
      }
    }
    for (size_t i = 0; i < sums_.size(); ++i) sums_[i] += partial[i];
    largest_.push_back(LargestMagnitude(partial));
  }
  largest_sum_ = LargestMagnitude(sums_);
  // n ranks: n - 1 additions and the divisions by n scales of int8 round numbers of at most n, by 2^-24 each.
  const auto ranks = static_cast<double>(tree.ranks.size());
  rounding_ = ranks * ranks * 0x1p-22;
}

double RealSums::BoundAt(size_t i, WireFormat wire, bool rounds_result) const {
  const bool is_bf16 = wire == WireFormat::kBf16;
  const double step = is_bf16 ? 0x1p-8 : 1.0 / 254 * (1 + 0x1p-15);
  // Every child's partial sum is rounded, except the owner's. Elements of int8 share the scale of their
  // group.
  double parts = 0, least = std::numeric_limits<double>::infinity();
  for (size_t child = 0; child < partials_.size(); ++child) {
    const double error = step * (is_bf16 ? std::fabs(partials_[child][i]) : largest_[child]);
    parts += error;
    least = std::min(least, error);
  }
  parts += rounding_ - least;
  if (!rounds_result) return parts;
  return parts + step * ((is_bf16 ? std::fabs(sums_[i]) : largest_sum_) + parts);
}

}  // namespace moesaic::comm
