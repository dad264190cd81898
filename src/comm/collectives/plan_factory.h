// Builds the plan of a collective for a hierarchy of ranks and a choice of algorithms.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"
#include "comm/collectives/plan.h"
#include "comm/collectives/rank_tree.h"

namespace moesaic::comm {

/// Algorithm among the children of one level; m children, V bytes. A flat tree has one level.
enum class Algorithm : uint8_t {
  kRing,      ///< m - 1 steps between neighbours per phase (Patarasuk and Yuan 2009)
  kPairwise,  ///< m - 1 steps per phase; in step k child i sends to i + k
  kHalving,   ///< recursive halving, then doubling: Rabenseifner's AllReduce (Thakur et al. 2005); any m by a
              ///< fold
  kBruck,     ///< gathers and AllToAll: ceil(log2(m)) steps for any m (Bruck et al. 1997)
  kDoubling,  ///< AllReduce by recursive doubling of the whole vector; any m by a fold
  kDirect,    ///< AllReduce: each child sends its vector to all others and adds in the order of children
  kLinear,    ///< one step per phase: each child sends to all others at once
  /// AllReduce in which no sum waits for a second message between the children of the root: see
  /// SingleCrossing().
  kSingleCrossing,
  kBinomial,       ///< Broadcast down a binomial tree
  kChain,          ///< Broadcast along a chain; meant for many segments
  kScatterGather,  ///< Broadcast as a scatter and a ring AllGather (van de Geijn)
  kDissemination,  ///< Barrier (Hensgen, Finkel and Manber 1988)
};
std::string_view Name(Algorithm algorithm);

/// Parameters of a plan in addition to its request.
struct PlanShape {
  Algorithm top = Algorithm::kRing;        ///< at the topmost level
  Algorithm inner = Algorithm::kPairwise;  ///< at the levels below
  /// Parts of the vector that follow each other through the steps, so that the levels work at the same time.
  int segments = 1;
  int streams = 1;  ///< streams among which segments are dealt
  /// Encoding of messages between the children of the root, where the tree has several levels. AllReduce and
  /// ReduceScatter only; the top level is then pairwise.
  WireFormat wire = WireFormat::kExact;
  /// Each element is summed by one rank in the order of ranks, so the result depends neither on the tree nor
  /// on time.
  bool fixed_order = false;
};

/// Returns whether the algorithm exists for the collective at the topmost level.
bool Supports(Collective collective, Algorithm algorithm);

/// InvalidArgument for a faulty request, for algorithms that the collective does not have, and for a tree
/// whose ranks are not exactly those of the request.
StatusOr<Plan> BuildPlan(const PlanRequest& request, const RankTree& tree, const PlanShape& shape);

}  // namespace moesaic::comm
