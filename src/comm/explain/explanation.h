// The planner's choices on a topology, compared with lower bounds and with flat algorithms.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "comm/collectives/plan.h"
#include "comm/explain/lower_bound.h"
#include "comm/topology/topology.h"

namespace moesaic::comm {

class TuningTable;

/// Maximum number of ranks of an explained topology.
inline constexpr int kMaxExplainedRanks = 512;

/// Placement of ranks: fill one child of the root after the other, or deal ranks to them in turn.
enum class RankOrder : uint8_t { kBlock, kRoundRobin };

/// Returns the ranks of the topology in the order of the tree, or dealt in turn to the children of the
/// topmost group that has several.
std::vector<int> OrderedRanks(const Topology& topology, RankOrder order);

/// One collective of one size.
struct Explanation {
  Collective collective = Collective::kAllReduce;
  int64_t bytes = 0;
  LowerBound bound;
  std::string algorithm;   ///< algorithm that the planner chooses
  double seconds = 0;      ///< predicted time of this algorithm
  double measured_s = 0;   ///< its time in the tuning table; 0: it has none
  std::string bottleneck;  ///< port that it uses longest: "node 0, out"; empty without traffic
  double busy = 0;         ///< share of the predicted time in which that port carries bytes
  /// Times of the flat algorithm (ring; pairwise AllToAll, binomial broadcast, dissemination barrier) in both
  /// orders.
  double flat_block_s = 0, flat_round_robin_s = 0;

  /// Returns the share of the bound. 1 is the best possible time.
  double share() const { return seconds > 0 ? bound.seconds / seconds : 1; }
};

/// InvalidArgument for more than kMaxExplainedRanks ranks.
Status CheckExplained(const Topology& topology);

/// Plans the collective and compares the plan with the bound and with flat algorithms. `bytes` is the size of
/// the vector (AllReduce, Broadcast), of all blocks of the result (AllGather) or of the input (ReduceScatter,
/// AllToAll) of one rank. Messages are exact. Elements have two bytes; sizes are rounded up to whole
/// elements, and those of AllToAll to equal blocks of whole elements. InvalidArgument for AllToAllv, which
/// has no size, and by CheckExplained(). If `tuning` is set, its times correct the predictions by which the
/// algorithm is chosen.
StatusOr<Explanation> Explain(const Topology& topology, Collective collective, int64_t bytes,
                              std::shared_ptr<const TuningTable> tuning = nullptr);

/// Returns the name of a channel without the root, such as "node 0, out".
std::string ChannelName(const Topology& topology, int channel);

/// Returns the tree as indented lines. Equal neighbours are one line with a count.
std::string TreeText(const Topology& topology);

/// Each formats a number, such as "25 GB/s" and "3 us".
std::string RateText(double bytes_per_s);
std::string TimeText(double seconds);
/// Returns "1.50x" and "67%", or "-" if the second argument is 0.
std::string FactorText(double seconds, double unit_seconds);
std::string ShareText(double part, double whole);

}  // namespace moesaic::comm
