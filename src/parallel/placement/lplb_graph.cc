// Replica graphs of LPLB: experts in the order of EPLB, and second replicas along the edges of a graph.
#include <algorithm>

#include "parallel/placement/baseline_slots.h"
#include "parallel/placement/published_balancers.h"

namespace moesaic::parallel {
namespace {

// Graph that needs the fewest assumptions: a cube for an even number of replicas in groups of eight, else a
// ring.
LplbGraph DefaultGraph(int ranks, int spare) {
  if (ranks % 8 == 0 && spare % 2 == 0) return LplbGraph::Cube();
  return LplbGraph::Ring(ranks % 8 == 0 ? 8 : ranks);
}

Status CheckGraph(const LoadMatrix& load, const LplbOptions& options, const LplbGraph& graph, int spare) {
  const int ranks = options.ranks;
  if (load.experts % ranks != 0)
    return InvalidArgument("ranks must divide the {} experts, found {}", load.experts, ranks);
  const int edges = static_cast<int>(graph.sources.size());
  if (edges == 0 || spare % edges != 0)
    return InvalidArgument("redundant slots of a rank must be a multiple of the graph's {} edges, found {}",
                           edges, spare);
  if (spare > load.experts / ranks)
    return InvalidArgument("redundant slots of a rank must be at most its {} experts, found {}",
                           load.experts / ranks, spare);
  const int size = static_cast<int>(graph.sources.front().size());
  if (size < 2 || ranks % size != 0)
    return InvalidArgument("groups of {} ranks must divide the {} ranks", size, ranks);
  for (const std::vector<int>& of_edge : graph.sources) {
    std::vector<int> sorted = of_edge;
    std::sort(sorted.begin(), sorted.end());
    for (int i = 0; i < size; ++i) {
      if (static_cast<int>(sorted.size()) != size || sorted[i] != i || of_edge[i] == i)
        return InvalidArgument("each edge of the graph must give every rank of a group to another one");
    }
  }
  return OkStatus();
}

}  // namespace

LplbGraph LplbGraph::Ring(int ranks) {
  LplbGraph graph{.sources = {{}}};
  for (int rank = 0; rank < ranks; ++rank) graph.sources[0].push_back((rank + 1) % ranks);
  return graph;
}

LplbGraph LplbGraph::Cube() { return {.sources = {{3, 0, 1, 2, 7, 4, 5, 6}, {6, 7, 4, 5, 0, 1, 2, 3}}}; }

LplbGraph LplbGraph::Hypercube() {
  LplbGraph graph{.sources = {{}, {}}};
  for (int rank = 0; rank < 16; ++rank) {
    graph.sources[0].push_back(rank / 4 * 4 + (rank + 3) % 4);
    graph.sources[1].push_back((rank + 12) % 16);
  }
  return graph;
}

LplbGraph LplbGraph::Torus(int rows, int columns) {
  LplbGraph graph{.sources = {{}, {}}};
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; ++column) {
      graph.sources[0].push_back((row + 1) % rows * columns + column);
      graph.sources[1].push_back(row * columns + (column + 1) % columns);
    }
  }
  return graph;
}

StatusOr<Placement> PlanLplbGraph(const LoadMatrix& load, const LplbOptions& options) {
  RETURN_IF_ERROR(CheckBaselineSlots(load, options.ranks, options.slots_per_rank));
  const int ranks = options.ranks, own = load.experts / ranks, spare = options.slots_per_rank - own;
  const LplbGraph graph = options.graph.sources.empty() ? DefaultGraph(ranks, spare) : options.graph;
  RETURN_IF_ERROR(CheckGraph(load, options, graph, spare));
  const int size = static_cast<int>(graph.sources.front().size());
  const int edges = static_cast<int>(graph.sources.size());
  ASSIGN_OR_RETURN(const EplbPlan plan,
                   PlanEplb(load, {.replicas = load.experts,
                                   .groups = ranks / size,
                                   .nodes = std::max(1, ranks / std::max(1, options.ranks_per_node)),
                                   .gpus = ranks}));
  Placement placement = FromEplb(plan, ranks);
  for (int layer = 0; layer < load.layers; ++layer) {
    const std::span<const double> tokens = load.layer(layer);
    LayerPlacement& placed = placement.layers[layer];
    for (std::vector<int>& rank : placed)
      std::stable_sort(rank.begin(), rank.end(), [&](int a, int b) { return tokens[a] > tokens[b]; });
    const LayerPlacement owned = placed;
    for (int rank = 0; rank < ranks; ++rank) {
      for (int i = 0; i < spare; ++i) {
        const int source = rank / size * size + graph.sources[i % edges][rank % size];
        placed[rank].push_back(owned[source][i]);
      }
    }
  }
  return placement;
}

}  // namespace moesaic::parallel
