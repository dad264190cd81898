#include "comm/explain/explanation.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "comm/collectives/planner.h"

namespace moesaic::comm {
namespace {

constexpr int kElementBytes = 2;

StatusOr<PlanRequest> RequestOf(Collective collective, int ranks, int64_t bytes) {
  PlanRequest request = {.collective = collective, .ranks = ranks, .element_bytes = kElementBytes};
  const int64_t count = (bytes + kElementBytes - 1) / kElementBytes;
  switch (collective) {
    case Collective::kAllReduce:
    case Collective::kBroadcast:
      request.count = count;
      break;
    case Collective::kAllToAll:
      request.count = (count + ranks - 1) / ranks;
      break;
    case Collective::kReduceScatter:
    case Collective::kAllGather:
      request.counts.assign(ranks, count / ranks);
      for (int rank = 0; rank < count % ranks; ++rank) ++request.counts[rank];
      break;
    case Collective::kAllToAllv:
      return InvalidArgument("a size does not describe the blocks of {}", Name(collective));
    case Collective::kBarrier:
      break;
  }
  return request;
}

Algorithm FlatAlgorithm(Collective collective) {
  switch (collective) {
    case Collective::kBroadcast:
      return Algorithm::kBinomial;
    case Collective::kAllToAll:
    case Collective::kAllToAllv:
      return Algorithm::kPairwise;
    case Collective::kBarrier:
      return Algorithm::kDissemination;
    default:
      return Algorithm::kRing;
  }
}

StatusOr<double> FlatSeconds(const PlanRequest& request, const Topology& topology, RankOrder order) {
  const RankTree flat = FlatTree(OrderedRanks(topology, order));
  ASSIGN_OR_RETURN(const Plan plan, BuildPlan(request, flat, {.top = FlatAlgorithm(request.collective)}));
  return SimulatePlan(plan, topology).seconds;
}

std::string DeviceText(const DeviceType& type) {
  std::vector<std::string> rates;
  for (const auto& [dtype, flops] : type.flops)
    rates.push_back(fmt::format("{:.4g} TFLOP/s {}", flops / 1e12, dtype));
  if (type.memory_bytes_per_s > 0)
    rates.push_back(fmt::format("memory {}", RateText(type.memory_bytes_per_s)));
  if (type.memory_bytes > 0) rates.push_back(fmt::format("{:.4g} GB", type.memory_bytes / 1e9));
  return rates.empty() ? type.name : fmt::format("{}: {}", type.name, fmt::join(rates, ", "));
}

// Lines of a group and its descendants, without the indentation of the group itself.
std::vector<std::string> TreeLines(const Topology& topology, int index) {
  const Group& group = topology.groups()[index];
  if (group.device_type >= 0) return {DeviceText(topology.device_types()[group.device_type])};
  std::vector<std::string> lines = {
      fmt::format("{}: {} per {}, {}{}", group.level, RateText(group.link.bytes_per_s),
                  group.link.shared ? "child" : "device below each child", TimeText(group.link.latency_s),
                  group.link.full_duplex ? "" : ", half duplex")};
  std::vector<std::pair<int, std::vector<std::string>>> children;  // count, lines
  for (const int child : group.children) {
    std::vector<std::string> below = TreeLines(topology, child);
    const double port = topology.groups()[child].port_bytes_per_s;
    if (port != group.link.bytes_per_s) below[0] += fmt::format(" [own port {}]", RateText(port));
    if (!children.empty() && children.back().second == below) {
      ++children.back().first;
    } else {
      children.emplace_back(1, std::move(below));
    }
  }
  for (auto& [count, below] : children) {
    if (count > 1) below[0] = fmt::format("{} x {}", count, below[0]);
    for (const std::string& line : below) lines.push_back("  " + line);
  }
  return lines;
}

}  // namespace

std::vector<int> OrderedRanks(const Topology& topology, RankOrder order) {
  std::vector<int> ranks(topology.ranks());
  std::iota(ranks.begin(), ranks.end(), 0);
  std::sort(ranks.begin(), ranks.end(), [&](int a, int b) { return topology.leaf(a) < topology.leaf(b); });
  if (order == RankOrder::kBlock) return ranks;
  const std::vector<Group>& groups = topology.groups();
  int top = 0;
  while (groups[top].children.size() == 1) top = groups[top].children[0];
  if (groups[top].children.empty()) return ranks;
  const auto child_of = [&](int rank) {  // child of the topmost group
    int group = topology.leaf(rank);
    while (groups[group].parent != top) group = groups[group].parent;
    return group;
  };
  std::vector<std::vector<int>> hands;  // ranks of each child, in the order of the tree
  size_t longest = 0;
  for (int child = -1; const int rank : ranks) {
    // The ranks of a child follow one another in the order of the tree.
    if (const int own = child_of(rank); own != child) {
      child = own;
      hands.emplace_back();
    }
    hands.back().push_back(rank);
    longest = std::max(longest, hands.back().size());
  }
  ranks.clear();
  for (size_t i = 0; i < longest; ++i) {
    for (const std::vector<int>& hand : hands) {
      if (i < hand.size()) ranks.push_back(hand[i]);
    }
  }
  return ranks;
}

Status CheckExplained(const Topology& topology) {
  if (topology.ranks() <= kMaxExplainedRanks) return OkStatus();
  return InvalidArgument("plans of at most {} ranks are compared; topology {} has {}", kMaxExplainedRanks,
                         topology.name(), topology.ranks());
}

StatusOr<Explanation> Explain(const Topology& topology, Collective collective, int64_t bytes,
                              std::shared_ptr<const TuningTable> tuning) {
  RETURN_IF_ERROR(CheckExplained(topology));
  ASSIGN_OR_RETURN(const PlanRequest request, RequestOf(collective, topology.ranks(), bytes));
  Planner planner(topology, {.cost = {}, .tuning = tuning});
  ASSIGN_OR_RETURN(const Candidate candidate, planner.Choose(request, {}));
  ASSIGN_OR_RETURN(const Plan plan, planner.Build(request, candidate));
  const PlanCost cost = SimulatePlan(plan, topology);
  Explanation explanation;
  explanation.collective = collective;
  explanation.bytes = bytes;
  explanation.bound = BoundOf(request, topology);
  explanation.algorithm = plan.algorithm;
  explanation.seconds = cost.seconds;
  if (tuning != nullptr) {
    explanation.measured_s =
        tuning->Find(collective, request.ranks, RequestBytes(request), Name(candidate)).value_or(0);
  }
  if (cost.bottleneck >= 0) {
    explanation.bottleneck = ChannelName(topology, cost.bottleneck);
    explanation.busy = cost.bottleneck_s / cost.seconds;
  }
  ASSIGN_OR_RETURN(explanation.flat_block_s, FlatSeconds(request, topology, RankOrder::kBlock));
  ASSIGN_OR_RETURN(explanation.flat_round_robin_s, FlatSeconds(request, topology, RankOrder::kRoundRobin));
  return explanation;
}

std::string ChannelName(const Topology& topology, int channel) {
  const Channel& port = topology.channels()[channel];
  const Group& group = topology.groups()[port.group];
  std::string name = group.name.substr(group.name.find('/') + 1);  // without the root
  if (port.rank >= 0 && group.device_type < 0) name += fmt::format(" (rank {})", port.rank);
  if (topology.groups()[group.parent].link.full_duplex) name += port.up ? ", out" : ", in";
  return name;
}

std::string TreeText(const Topology& topology) {
  return fmt::format("{}\n", fmt::join(TreeLines(topology, 0), "\n"));
}

std::string RateText(double bytes_per_s) { return fmt::format("{:.4g} GB/s", bytes_per_s / 1e9); }

std::string FactorText(double seconds, double unit_seconds) {
  return unit_seconds > 0 ? fmt::format("{:.2f}x", seconds / unit_seconds) : "-";
}

std::string ShareText(double part, double whole) {
  return whole > 0 ? fmt::format("{:.0f}%", 100 * part / whole) : "-";
}

std::string TimeText(double seconds) {
  if (seconds >= 1) return fmt::format("{:.4g} s", seconds);
  if (seconds >= 1e-3) return fmt::format("{:.4g} ms", seconds * 1e3);
  return fmt::format("{:.4g} us", seconds * 1e6);
}

}  // namespace moesaic::comm
