// Traffic between nodes that a placement causes.
#pragma once

#include <span>
#include <vector>

#include "parallel/placement/placement.h"

namespace moesaic::parallel {

/// Experts that a router chooses for a token.
struct Routing {
  int top_k = 8;       ///< experts per token
  int groups = 1;      ///< groups of adjacent experts, of equal size
  int top_groups = 1;  ///< groups from which a token's experts come
};

/// InvalidArgument unless groups divide the experts and a token's experts fit.
Status CheckRouting(const Routing& routing, int experts);

/// Expected number of other nodes that receive a token. Each node gets a token once (node deduplication), so
/// bytes between nodes are this number times tokens times bytes of a token. Ranks are divided among `nodes`
/// in order, equally. Model: tokens start on all nodes equally often. A token chooses groups independently,
/// and experts of a chosen group independently, with probabilities that give the loads. It uses a replica on
/// its own node if there is one, and otherwise each replica with equal probability. 0 for a layer without
/// tokens.
double RemoteNodes(const LayerPlacement& layer, std::span<const double> loads, int nodes,
                   const Routing& routing);

/// Expected share of all tokens that each node receives from other nodes, under the same model. The sum is
/// RemoteNodes().
std::vector<double> TokensReceived(const LayerPlacement& layer, std::span<const double> loads, int nodes,
                                   const Routing& routing);

/// Exchanges ranks of equal speed that hold equally many experts between nodes, as long as that lowers
/// RemoteNodes(). Loads of ranks stay the same, in another order. `speeds` are per rank; empty: equal.
/// Deterministic.
LayerPlacement OrderRanks(LayerPlacement layer, std::span<const double> loads, std::span<const double> speeds,
                          int nodes, const Routing& routing);

}  // namespace moesaic::parallel
