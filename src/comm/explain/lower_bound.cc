#include "comm/explain/lower_bound.h"

#include <algorithm>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

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

// A part of a division of the ranks. `outside` parts are all ranks that are not in the group.
struct Part {
  int group = 0;
  bool outside = false;
};

class BoundSearch {
 public:
  BoundSearch(const PlanRequest& request, const Topology& topology)
      : topology_(topology), demand_(request, topology), latency_(topology.groups().size(), 0) {
    for (size_t g = 0; g < latency_.size(); ++g) {
      const Group& group = topology.groups()[g];
      latency_[g] =
          group.parent < 0 ? group.link.latency_s : std::min(group.link.latency_s, latency_[group.parent]);
    }
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
    return best_;
  }

 private:
  // Smallest latency of a message through the group's port: its receiver may be far away.
  double PortLatency(int group) const { return latency_[topology_.groups()[group].parent]; }

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
    if (!Offer(PortLatency(g), busiest / capacity, g, false)) return;
    const char* direction = "";
    if (full_duplex && crossing.out != crossing.in) direction = crossing.out > crossing.in ? ", out" : ", in";
    const bool shared = topology_.groups()[group.parent].link.shared || group.device_type >= 0;
    best_.bottleneck = fmt::format("{} of {}{}", shared ? "port" : "ports", ShortName(group), direction);
  }

  // The children of a group are parts. All ranks outside the group are another one, connected by the port of
  // the group.
  void AddChildren(int g) {
    const Group& group = topology_.groups()[g];
    std::vector<Part> parts;
    for (const int child : group.children) parts.push_back({child, false});
    const bool has_outside = group.ranks.size() < topology_.groups()[0].ranks.size();
    if (has_outside) parts.push_back({g, true});
    AddDivision(parts, g);
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
      std::vector<Part> division;
      for (const int part : parts) division.push_back({part, false});
      AddDivision(division, 0);
    }
  }

  void AddDivision(const std::vector<Part>& parts, int group) {
    const double bytes = demand_.Total(parts.size());
    if (parts.size() < 2 || bytes == 0) return;
    double all = 0, latency = latency_[0];
    for (const Part& part : parts) {
      all += Capacity(part.group);
      latency = std::min(
          latency, part.outside ? PortLatency(part.group) : latency_[topology_.groups()[part.group].parent]);
    }
    // A port cannot carry more than the others together, since each message passes two of them.
    double usable = 0;
    for (const Part& part : parts) usable += std::min(Capacity(part.group), all - Capacity(part.group));
    if (!Offer(latency, 2 * bytes / usable, group, true)) return;
    const std::vector<Group>& groups = topology_.groups();
    best_.bottleneck = fmt::format("ports of {} x {}", parts.size() - (parts.back().outside ? 1 : 0),
                                   groups[parts.front().group].level);
    if (group != 0) best_.bottleneck += fmt::format(" in {}", ShortName(groups[group]));
  }

  const Topology& topology_;
  const Demand demand_;
  std::vector<double> latency_;  // by group: smallest latency of its link and those above
  bool waits_for_all_ = false;
  LowerBound best_;
};

}  // namespace

LowerBound BoundOf(const PlanRequest& request, const Topology& topology) {
  return BoundSearch(request, topology).Run();
}

}  // namespace moesaic::comm
