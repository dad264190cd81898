#include "science/neighbors.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <tuple>

namespace moesaic::graph {
namespace {

constexpr int kMaxPoints = 1 << 28;  // 3 n fits in int32

using Candidate = std::pair<float, int32_t>;  // squared distance, point

struct PointSet {
  int32_t first, last;
};

StatusOr<std::vector<PointSet>> CheckPoints(std::span<const float> xyz, std::span<const int32_t> sets) {
  if (xyz.size() % 3 != 0)
    return InvalidArgument("coordinates must be [n, 3], but have {} elements", xyz.size());
  const auto n = static_cast<int64_t>(xyz.size() / 3);
  if (n > kMaxPoints) return InvalidArgument("there must be at most {} points, not {}", kMaxPoints, n);
  for (size_t i = 0; i < xyz.size(); ++i) {
    if (!std::isfinite(xyz[i]))
      return InvalidArgument("coordinate {} of point {} must be finite, but is {}", i % 3, i / 3, xyz[i]);
  }
  if (sets.empty()) return std::vector<PointSet>{{0, static_cast<int32_t>(n)}};
  std::vector<PointSet> found;
  for (size_t i = 0; i + 1 < sets.size(); ++i) {
    if (sets[i] > sets[i + 1])
      return InvalidArgument("sets[{}] must be {} or more, but is {}", i + 1, sets[i], sets[i + 1]);
    found.push_back({sets[i], sets[i + 1]});
  }
  if (sets.front() != 0 || sets.back() != n) {
    return InvalidArgument("sets must go from 0 to {}, not from {} to {}", n, sets.front(), sets.back());
  }
  return found;
}

float Squared(std::span<const float> xyz, int32_t i, int32_t j) {
  return SquaredDistance(xyz.data() + 3 * size_t(i), xyz.data() + 3 * size_t(j));
}

// Neighbours of i in ascending order.
std::vector<int32_t> NeighborsOf(std::span<const float> xyz, const PointSet& set, int32_t i,
                                 const NearestOptions& options, std::vector<Candidate>* candidates) {
  candidates->clear();
  for (int32_t j = set.first; j < set.last; ++j) {
    if (j != i || options.self) candidates->emplace_back(Squared(xyz, i, j), j);
  }
  const auto kept = std::min<size_t>(options.k, candidates->size());
  if (kept < candidates->size())
    std::nth_element(candidates->begin(), candidates->begin() + kept, candidates->end());
  std::vector<int32_t> found;
  for (size_t c = 0; c < kept; ++c) found.push_back((*candidates)[c].second);
  auto number = [&](int32_t p) { return options.sequence.empty() ? p : options.sequence[p]; };
  if (options.window > 0) {
    for (int32_t j = set.first; j < set.last; ++j) {
      if (j != i && std::abs(int64_t{number(j)} - number(i)) < options.window) found.push_back(j);
    }
  }
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

const PointSet& SetOf(const std::vector<PointSet>& sets, int32_t point) {
  return *std::partition_point(sets.begin(), sets.end(), [&](const PointSet& s) { return s.last <= point; });
}

// Runs find(i, worker) for every point and joins the lists in order.
template <typename Find>
EdgeList JoinLists(const Context& ctx, int32_t n, bool by_source, const Find& find) {
  std::vector<std::vector<int32_t>> lists(n);
  ctx.exec.pool->Run(n, [&](int64_t i, int worker) { lists[i] = find(static_cast<int32_t>(i), worker); });
  size_t total = 0;
  for (const auto& list : lists) total += list.size();
  EdgeList edges;
  edges.src.reserve(total);
  edges.dst.reserve(total);
  for (int32_t i = 0; i < n; ++i) {
    for (const int32_t j : lists[i]) {
      edges.src.push_back(by_source ? i : j);
      edges.dst.push_back(by_source ? j : i);
    }
  }
  return edges;
}

// Points sorted into cubic cells whose side is the radius.
class CellGrid {
 public:
  using Cell = std::tuple<int32_t, int64_t, int64_t, int64_t>;  // set, then position in the grid

  CellGrid(std::span<const float> xyz, const std::vector<PointSet>& sets, float side) {
    for (int32_t s = 0; s < static_cast<int32_t>(sets.size()); ++s) {
      for (int32_t i = sets[s].first; i < sets[s].last; ++i) {
        auto place = [&](int axis) {
          return static_cast<int64_t>(std::floor(double{xyz[3 * size_t(i) + axis]} / side));
        };
        points_.emplace_back(Cell{s, place(0), place(1), place(2)}, i);
      }
    }
    cells_.resize(points_.size());
    for (const auto& [cell, i] : points_) cells_[i] = cell;
    std::sort(points_.begin(), points_.end());
  }

  template <typename Visit>
  void VisitNear(int32_t point, const Visit& visit) const {
    const auto& [set, x, y, z] = cells_[point];
    for (int64_t dx = -1; dx <= 1; ++dx) {
      for (int64_t dy = -1; dy <= 1; ++dy) {  // cells of a row along z are adjacent in the order
        const std::pair<Cell, int32_t> low = {{set, x + dx, y + dy, z - 1}, 0};
        const Cell high = {set, x + dx, y + dy, z + 1};
        for (auto it = std::lower_bound(points_.begin(), points_.end(), low);
             it != points_.end() && it->first <= high; ++it)
          visit(it->second);
      }
    }
  }

 private:
  std::vector<std::pair<Cell, int32_t>> points_;
  std::vector<Cell> cells_;
};

}  // namespace

StatusOr<EdgeList> NearestGraph(const Context& ctx, std::span<const float> xyz,
                                const NearestOptions& options) {
  ASSIGN_OR_RETURN(const std::vector<PointSet> sets, CheckPoints(xyz, options.sets));
  const auto n = static_cast<int32_t>(xyz.size() / 3);
  if (options.k < 0 || options.window < 0) {
    return InvalidArgument("k and window must be 0 or more, not {} and {}", options.k, options.window);
  }
  if (!options.sequence.empty() && static_cast<int64_t>(options.sequence.size()) != n) {
    return InvalidArgument("sequence must have {} elements, but has {}", n, options.sequence.size());
  }
  std::vector<std::vector<Candidate>> candidates(ctx.exec.pool->size());
  return JoinLists(ctx, n, true, [&](int32_t i, int worker) {
    return NeighborsOf(xyz, SetOf(sets, i), i, options, &candidates[worker]);
  });
}

StatusOr<EdgeList> RadiusGraph(const Context& ctx, std::span<const float> xyz, const RadiusOptions& options) {
  ASSIGN_OR_RETURN(const std::vector<PointSet> sets, CheckPoints(xyz, options.sets));
  if (!(options.radius > 0) || !std::isfinite(options.radius)) {
    return InvalidArgument("the radius must be positive and finite, but is {}", options.radius);
  }
  if (options.max_neighbors < 0)
    return InvalidArgument("max_neighbors must be 0 or more, but is {}", options.max_neighbors);
  constexpr double kMaxCell = 0x1p52;  // positions in the grid are exact and fit in int64
  for (size_t i = 0; i < xyz.size(); ++i) {
    if (std::abs(double{xyz[i]} / options.radius) > kMaxCell) {
      return InvalidArgument("coordinate {} of point {} must be at most 2^52 times the radius {}, but is {}",
                             i % 3, i / 3, options.radius, xyz[i]);
    }
  }
  const CellGrid grid(xyz, sets, options.radius);
  std::vector<std::vector<Candidate>> candidates(ctx.exec.pool->size());
  return JoinLists(ctx, static_cast<int32_t>(xyz.size() / 3), false, [&](int32_t i, int worker) {
    std::vector<Candidate>& near = candidates[worker];
    near.clear();
    grid.VisitNear(i, [&](int32_t j) {
      const float squared = Squared(xyz, i, j);
      if (squared <= options.radius * options.radius && (j != i || options.self))
        near.emplace_back(squared, j);
    });
    const auto kept =
        options.max_neighbors > 0 ? std::min<size_t>(options.max_neighbors, near.size()) : near.size();
    if (kept < near.size()) std::nth_element(near.begin(), near.begin() + kept, near.end());
    std::vector<int32_t> found;
    for (size_t c = 0; c < kept; ++c) found.push_back(near[c].second);
    std::sort(found.begin(), found.end());
    return found;
  });
}

}  // namespace moesaic::graph
