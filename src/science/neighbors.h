// Graphs from coordinates: nearest neighbours and neighbours within a radius.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "science/graph_kernels.h"

namespace moesaic::graph {

inline float SquaredDistance(const float* a, const float* b) {
  const float x = a[0] - b[0], y = a[1] - b[1], z = a[2] - b[2];
  return x * x + y * y + z * z;
}

/// Edges, sorted by (src, dst) if NearestGraph() made them, and by (dst, src) if RadiusGraph() did.
struct EdgeList {
  std::vector<int32_t> src, dst;
};

/// Options of NearestGraph(), which follows RoseTTAFold's make_graph.
struct NearestOptions {
  int k = 30;
  /// Also connects i and j with 0 < |i - j| < window: neighbours in the chain. 0 connects none.
  int window = 0;
  bool self = false;  ///< Counts a point among its own neighbours, as ProteinMPNN does.
  /// Numbers that `window` compares, [n], or empty for the position in xyz.
  std::span<const int32_t> sequence = {};
  /// Boundaries of independent point sets, such as those of a batch: [sets + 1]; empty: one set.
  std::span<const int32_t> sets = {};
};

/// Edges i -> j for the k points j nearest to each i (all others if there are fewer), and for neighbours in
/// the chain. xyz is [n, 3]. Equal distances prefer the smaller j. Fails if a coordinate is not finite.
StatusOr<EdgeList> NearestGraph(const Context& ctx, std::span<const float> xyz,
                                const NearestOptions& options);

/// Options of RadiusGraph().
struct RadiusOptions {
  float radius = 8;
  int max_neighbors = 0;  ///< Maximum sources of a destination, the nearest ones; 0: all.
  bool self = false;      ///< Adds an edge from each point to itself.
  std::span<const int32_t> sets = {};
};

/// Edges j -> i for all points with distance at most `radius`, through a grid of cells of that size: time
/// grows with the number of edges. Sources of a destination ascend. Fails if a coordinate is not finite, or
/// above 2^52 times the radius.
StatusOr<EdgeList> RadiusGraph(const Context& ctx, std::span<const float> xyz, const RadiusOptions& options);

}  // namespace moesaic::graph
