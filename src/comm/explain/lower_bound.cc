#include "comm/explain/lower_bound.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/explain/crossing_bound.h"

namespace moesaic::comm {
namespace {

// Bytes that cross the border of a part.
struct Crossing {
  double out = 0, in = 0;
};

// Bytes that every algorithm of a collective moves.
class Demand {
 public:
  Demand(const PlanRequest& request, const Topology& topology)
      : request_(request), crossings_(topology.groups().size()) {
    for (size_t g = 1; g < crossings_.size(); ++g) crossings_[g] = CrossingOf(topology.groups()[g]);
    if (request.collective == Collective::kAllToAllv) AddPairs(topology);
  }

  const Crossing& of_group(int group) const { return crossings_[group]; }
  Collective collective() const { return request_.collective; }

  // Bytes that parts send to each other when the ranks are divided into `parts` of them; 0: only the single
  // ports bind.
  double Total(size_t parts) const {
    const double others = static_cast<double>(parts) - 1;
    switch (request_.collective) {
      case Collective::kAllReduce:
        return 2 * others * Bytes(request_.count);
      case Collective::kBroadcast:
        return others * Bytes(request_.count);
      case Collective::kReduceScatter:
      case Collective::kAllGather:
        return others * OwnedBy({}, /*all=*/true);
      default:
        return 0;
    }
  }

 private:
  double Bytes(int64_t count) const { return static_cast<double>(count) * request_.element_bytes; }

  double OwnedBy(const std::vector<int>& ranks, bool all) const {
    int64_t count = 0;
    if (all) count = std::accumulate(request_.counts.begin(), request_.counts.end(), int64_t{0});
    for (const int rank : ranks) count += request_.counts[rank];
    return Bytes(count);
  }

  Crossing CrossingOf(const Group& group) const {
    const auto inside = static_cast<double>(group.ranks.size());
    const double outside = request_.ranks - inside;
    if (outside == 0) return {};
    switch (request_.collective) {
      case Collective::kAllReduce:
        return {Bytes(request_.count), Bytes(request_.count)};
      case Collective::kBroadcast: {
        const bool has_root = std::binary_search(group.ranks.begin(), group.ranks.end(), request_.root);
        const double bytes = Bytes(request_.count);
        return has_root ? Crossing{bytes, 0} : Crossing{0, bytes};
      }
      case Collective::kReduceScatter:
      case Collective::kAllGather: {
        const double own = OwnedBy(group.ranks, false), rest = OwnedBy({}, true) - own;
        return request_.collective == Collective::kAllGather ? Crossing{own, rest} : Crossing{rest, own};
      }
      case Collective::kAllToAll:
        return {inside * outside * Bytes(request_.count), inside * outside * Bytes(request_.count)};
      default:
        return {};
    }
  }

  void AddPairs(const Topology& topology) {
    for (int from = 0; from < request_.ranks; ++from) {
      for (int to = 0; to < request_.ranks; ++to) {
        const double bytes = Bytes(request_.matrix[static_cast<size_t>(from) * request_.ranks + to]);
        if (from == to || bytes == 0) continue;
        const int top = topology.CommonGroup(from, to);
        for (int g = topology.leaf(from); g != top; g = topology.groups()[g].parent)
          crossings_[g].out += bytes;
        for (int g = topology.leaf(to); g != top; g = topology.groups()[g].parent) crossings_[g].in += bytes;
      }
    }
  }

  const PlanRequest& request_;
  std::vector<Crossing> crossings_;  // by group
};

// Name without that of the root.
std::string ShortName(const Group& group) { return group.name.substr(group.name.find('/') + 1); }

// Ranks of a group, or with `outside` all ranks that are not in it. A division of the ranks has several.
struct RankSet {
  int group = 0;
  bool outside = false;
};

class BoundSearch {
 public:
  BoundSearch(const PlanRequest& request, const Topology& topology)
      : topology_(topology), demand_(request, topology) {
    // Every rank of a barrier needs a message, at least indirectly, from every other one; other collectives
    // move bytes.
    waits_for_all_ = request.collective == Collective::kBarrier;
  }

  LowerBound Run() {
    const std::vector<Group>& groups = topology_.groups();
    for (int g = 0; g < std::ssize(groups); ++g) {
      AddPort(g);
      AddChildren(g);
    }
    AddDepths();
    if (demand_.collective() == Collective::kAllReduce) AddCrossings();
    return best_;
  }

 private:
  // Number of children of a part, and the latency of their messages to each other.
  struct Inside {
    double latency = 0, children = 1;
  };
  Inside InsideOf(int part) const {
    const std::vector<Group>& groups = topology_.groups();
    while (groups[part].children.size() == 1) part = groups[part].children.front();
    if (groups[part].children.empty()) return {};
    return {groups[part].link.latency_s, static_cast<double>(groups[part].children.size())};
  }

  struct Wait {
    double latency = 0, transfer = 0;
  };
  // Messages between parts carry sums of a part's m children, and children pass results on to each other,
  // which takes a message between children each. A part that sends the terms of its children apart starts at
  // once, but sends m times as many bytes: that regains one m-th of the time in which no sum can be under
  // way.
  static Wait WithSums(double latency, const Inside& inside, bool both_ways, double transfer) {
    const double around = (both_ways ? 2 : 1) * inside.latency * (1 - 1 / inside.children);
    const double apart = inside.children * transfer;
    return apart < around + transfer ? Wait{latency, apart} : Wait{latency + around, transfer};
  }

  // Bytes per second of all ports of a group, both directions together.
  double Capacity(int group) const {
    const Group& own = topology_.groups()[group];
    const Link& link = topology_.groups()[own.parent].link;
    return own.port_bytes_per_s * (link.shared ? 1 : static_cast<double>(own.ranks.size())) *
           (link.full_duplex ? 2 : 1);
  }

  bool Offer(double latency, double transfer, int group, bool together) {
    if (latency + transfer <= best_.seconds) return false;
    best_.seconds = latency + transfer;
    best_.latency_s = latency;
    best_.transfer_s = transfer;
    best_.group = group;
    best_.together = together;
    return true;
  }

  void AddPort(int g) {
    const Group& group = topology_.groups()[g];
    if (group.parent < 0) return;
    const Crossing& crossing = demand_.of_group(g);
    const bool full_duplex = topology_.groups()[group.parent].link.full_duplex;
    const double busiest = full_duplex ? std::max(crossing.out, crossing.in) : crossing.out + crossing.in;
    const bool waits = waits_for_all_ && group.ranks.size() < topology_.groups()[0].ranks.size();
    if (busiest == 0 && !waits) return;
    const double capacity = full_duplex ? Capacity(g) / 2 : Capacity(g);
    if (!Offer(topology_.PortLatency(g), busiest / capacity, g, false)) return;
    const char* direction = "";
    if (full_duplex && crossing.out != crossing.in) direction = crossing.out > crossing.in ? ", out" : ", in";
    const bool shared = topology_.groups()[group.parent].link.shared || group.device_type >= 0;
    best_.bottleneck = fmt::format("{} of {}{}", shared ? "port" : "ports", ShortName(group), direction);
  }

  // The children of a group are parts. All ranks outside the group are another one, connected by the port of
  // the group.
  void AddChildren(int g) {
    const Group& group = topology_.groups()[g];
    std::vector<RankSet> parts;
    for (const int child : group.children) parts.push_back({child, false});
    const bool has_outside = group.ranks.size() < topology_.groups()[0].ranks.size();
    if (has_outside) parts.push_back({g, true});
    AddDivision(parts, g);
  }

  void AddCrossings() {
    const std::vector<Group>& groups = topology_.groups();
    const CrossingBound crossings(topology_);
    for (int g = 1; g < std::ssize(groups); ++g) {
      const double bytes = demand_.of_group(g).in;  // one vector in each direction
      const double capacity = Capacity(g) / (groups[groups[g].parent].link.full_duplex ? 2 : 1);
      const double seconds = crossings.Seconds(g, bytes, capacity, best_.seconds);
      if (!Offer(seconds - bytes / capacity, bytes / capacity, g, false)) continue;
      best_.bottleneck = fmt::format("port of {}", ShortName(groups[g]));
    }
  }

  // Groups of one depth; devices that are less deep stay.
  void AddDepths() {
    const std::vector<Group>& groups = topology_.groups();
    std::vector<int> parts = {0};
    for (bool divided = true; divided;) {
      divided = false;
      std::vector<int> next;
      for (const int part : parts) {
        const std::vector<int>& children = groups[part].children;
        divided |= !children.empty();
        if (children.empty()) next.push_back(part);
        next.insert(next.end(), children.begin(), children.end());
      }
      parts = std::move(next);
      std::vector<RankSet> division;
      for (const int part : parts) division.push_back({part, false});
      AddDivision(division, 0);
    }
  }

  void AddDivision(const std::vector<RankSet>& parts, int group) {
    const double bytes = demand_.Total(parts.size());
    if (parts.size() < 2 || bytes == 0) return;
    double all = 0, latency = std::numeric_limits<double>::infinity();
    for (const RankSet& part : parts) {
      all += Capacity(part.group);
      latency = std::min(latency, topology_.PortLatency(part.group));
    }
    Inside inside = {latency, std::numeric_limits<double>::infinity()};
    for (const RankSet& part : parts) {
      const Inside own = part.outside ? Inside{0, 1} : InsideOf(part.group);
      inside = {std::min(inside.latency, own.latency), std::min(inside.children, own.children)};
    }
    // A port cannot carry more than the others together, since each message passes two of them.
    double usable = 0;
    for (const RankSet& part : parts) usable += std::min(Capacity(part.group), all - Capacity(part.group));
    const bool both_ways = demand_.collective() == Collective::kAllReduce;
    Wait wait = WithSums(latency, inside, both_ways, 2 * bytes / usable);
    if (both_ways && wait.latency + wait.transfer < 2 * latency) {
      // Faster than two messages one after the other: all parts send their terms to each other.
      wait = WithSums(latency, inside, both_ways, bytes / usable * static_cast<double>(parts.size()));
      if (wait.latency + wait.transfer > 2 * latency) wait = {2 * latency, 0};
    }
    if (!Offer(wait.latency, wait.transfer, group, true)) return;
    const std::vector<Group>& groups = topology_.groups();
    best_.bottleneck = fmt::format("ports of {} x {}", parts.size() - (parts.back().outside ? 1 : 0),
                                   groups[parts.front().group].level);
    if (group != 0) best_.bottleneck += fmt::format(" in {}", ShortName(groups[group]));
  }

  const Topology& topology_;
  const Demand demand_;
  bool waits_for_all_ = false;
  LowerBound best_;
};

}  // namespace

LowerBound BoundOf(const PlanRequest& request, const Topology& topology) {
  return BoundSearch(request, topology).Run();
}

}  // namespace moesaic::comm
