#include "comm/probe/rank_groups.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "comm/topology/topology_builder.h"

namespace moesaic::comm {
namespace {

constexpr double kLargeMessage = 4 << 20;  // bytes; its time counts as much as that of a small message
constexpr double kOwnPort = 1.25;  // a port that differs by more than this from the median has its own value

double MedianOf(std::vector<double> values) {
  MOESAIC_CHECK(!values.empty());
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Rounds to four digits in the unit of files; more would be noise.
double RoundedSeconds(double value) {
  return std::strtod(fmt::format("{:.4g}", value * 1e6).c_str(), nullptr) / 1e6;
}
double RoundedRate(double value) {
  return std::strtod(fmt::format("{:.4g}", value / 1e9).c_str(), nullptr) * 1e9;
}

// Median latency and bandwidth of some pairs.
struct LinkMedians {
  double latency_s = 0, bytes_per_s = 0;
};

LinkMedians MediansBetween(const LinkMatrix& links, const std::vector<int>& a, const std::vector<int>& b) {
  std::vector<double> latencies, rates;
  for (const int from : a) {
    for (const int to : b) {
      if (from == to) continue;
      latencies.push_back(links.latency(from, to));
      rates.push_back(links.bandwidth(from, to));
    }
  }
  return {MedianOf(std::move(latencies)), MedianOf(std::move(rates))};
}

// A merge of two clusters, or a rank.
struct Merge {
  std::vector<int> ranks;
  int left = -1, right = -1;
  bool is_host = false;  // all ranks of a host that has several
};

class Clustering {
 public:
  Clustering(const LinkMatrix& links, std::span<const RankPlace> places) : links_(links), places_(places) {}

  RankGroup Run() {
    for (int rank = 0; rank < links_.ranks; ++rank) {
      merges_.push_back({{rank}});
      ++ranks_of_host_[places_[rank].host];
    }
    std::vector<int> open(links_.ranks);
    std::iota(open.begin(), open.end(), 0);
    while (open.size() > 1) MergeNearest(&open);
    return GroupOf(open.front());
  }

 private:
  // Geometric mean of the times of a small and a large message.
  double Distance(int a, int b) const {
    const double small = std::max(links_.latency(a, b), 1e-9);
    return std::sqrt(small * (small + kLargeMessage / links_.bandwidth(a, b)));
  }

  double AverageDistance(const Merge& a, const Merge& b) const {
    double sum = 0;
    for (const int from : a.ranks) {
      for (const int to : b.ranks) sum += Distance(from, to);
    }
    return sum / static_cast<double>(a.ranks.size() * b.ranks.size());
  }

  const std::string& HostOf(const Merge& merge) const { return places_[merge.ranks[0]].host; }
  // Whether the cluster has all ranks of one host, or of several.
  bool HasWholeHosts(const Merge& merge) const {
    return std::ssize(merge.ranks) >= ranks_of_host_.at(HostOf(merge));
  }
  bool MayMerge(const Merge& a, const Merge& b) const {
    return HostOf(a) == HostOf(b) || (HasWholeHosts(a) && HasWholeHosts(b));
  }

  void MergeNearest(std::vector<int>* open) {
    double nearest = std::numeric_limits<double>::infinity();
    size_t left = 0, right = 0;
    for (size_t i = 0; i < open->size(); ++i) {
      for (size_t j = i + 1; j < open->size(); ++j) {
        const Merge &a = merges_[(*open)[i]], &b = merges_[(*open)[j]];
        if (!MayMerge(a, b)) continue;
        const auto [known, added] = distances_.try_emplace({(*open)[i], (*open)[j]}, 0);
        if (added) known->second = AverageDistance(a, b);
        if (known->second >= nearest) continue;
        nearest = known->second;
        left = i;
        right = j;
      }
    }
    Merge merged = {merges_[(*open)[left]].ranks, (*open)[left], (*open)[right]};
    const std::vector<int>& more = merges_[merged.right].ranks;
    merged.is_host = HostOf(merges_[merged.left]) == HostOf(merges_[merged.right]);
    merged.ranks.insert(merged.ranks.end(), more.begin(), more.end());
    std::sort(merged.ranks.begin(), merged.ranks.end());
    merged.is_host = merged.is_host && HasWholeHosts(merged);
    open->erase(open->begin() + static_cast<std::ptrdiff_t>(right));
    (*open)[left] = static_cast<int>(merges_.size());
    merges_.push_back(std::move(merged));
    std::sort(open->begin(), open->end());
  }

  // Whether `inner` is a level of its own within the group that `outer` completes.
  bool IsApart(const Merge& inner, const Merge& outer) const {
    if (inner.is_host && HostOf(inner) != places_[outer.ranks.back()].host) return true;
    if (inner.is_host) {
      for (const int rank : outer.ranks) {
        if (places_[rank].host != HostOf(inner)) return true;
      }
    }
    const LinkMedians near = MediansBetween(links_, inner.ranks, inner.ranks);
    const LinkMedians far = MediansBetween(links_, merges_[outer.left].ranks, merges_[outer.right].ranks);
    return far.latency_s > kLevelRatio * near.latency_s || near.bytes_per_s > kLevelRatio * far.bytes_per_s;
  }

  RankGroup GroupOf(int index) const {
    const Merge& merge = merges_[index];
    RankGroup group{.ranks = merge.ranks, .children = {}};
    if (merge.left >= 0) AddChildren(index, merge, &group);
    std::sort(group.children.begin(), group.children.end(),
              [](const RankGroup& a, const RankGroup& b) { return a.ranks[0] < b.ranks[0]; });
    return group;
  }

  // Adds the parts of `index`, which is the merge `outer` or one that dissolves in it.
  void AddChildren(int index, const Merge& outer, RankGroup* group) const {
    for (const int part : {merges_[index].left, merges_[index].right}) {
      if (merges_[part].left < 0 || IsApart(merges_[part], outer)) {
        group->children.push_back(GroupOf(part));
      } else {
        AddChildren(part, outer, group);
      }
    }
  }

  const LinkMatrix& links_;
  std::span<const RankPlace> places_;
  std::vector<Merge> merges_;
  std::map<std::string, std::ptrdiff_t> ranks_of_host_;
  std::map<std::pair<int, int>, double> distances_;  // between merges
};

constexpr std::array<const char*, 6> kLevels = {"cluster", "node", "socket", "NUMA node", "cache", "core"};

// Whether all ranks are in one domain of the level.
bool ShareDomain(const std::vector<int>& ranks, std::span<const RankPlace> places, size_t level) {
  const RankPlace& first = places[ranks[0]];
  const auto domain = [level](const RankPlace& place) {
    switch (level) {
      case 2:
        return place.socket;
      case 3:
        return place.numa_node;
      case 4:
        return place.cache;
      default:
        return place.core;
    }
  };
  return std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
    if (level == 0) return true;
    if (places[rank].host != first.host) return false;
    return level == 1 || (domain(first) >= 0 && domain(places[rank]) == domain(first));
  });
}

class TopologyMaker {
 public:
  TopologyMaker(const LinkMatrix& links, std::span<const RankPlace> places) : links_(links), places_(places) {
    std::map<std::string, int> ranks_of_host;
    for (const RankPlace& place : places) ++ranks_of_host[place.host];
    for (const RankPlace& place : places) {
      // Tenths of a gigabyte, so that equal machines have devices of one type.
      const double share = static_cast<double>(place.memory_bytes) / ranks_of_host[place.host];
      const double memory = std::round(share / 1e8) * 1e8;
      const auto known = std::find_if(types_.begin(), types_.end(),
                                      [&](const DeviceType& type) { return type.memory_bytes == memory; });
      type_of_rank_.push_back(static_cast<int>(known - types_.begin()));
      if (known != types_.end()) continue;
      const std::string name = types_.empty() ? "cpu" : fmt::format("cpu-{}", types_.size() + 1);
      types_.push_back({name, {}, 0, memory});
    }
  }

  Topology Make(const RankGroup& root, const std::string& name, std::string origin) {
    const bool one_host = ShareDomain(root.ranks, places_, 1);
    if (root.children.empty()) {  // a single rank
      const int group = builder_.AddGroup(-1, kLevels[1], {1e-6, 1e9}, 0);
      builder_.AddDevice(group, type_of_rank_[root.ranks[0]], 0);
      return builder_.Finish(name, std::move(origin), std::move(types_));
    }
    Add(root, -1, 0, one_host ? 1 : 0);
    if (!std::is_sorted(order_.begin(), order_.end())) {
      origin += fmt::format("; devices are the probed ranks {}", fmt::join(order_, " "));
    }
    return builder_.Finish(name, std::move(origin), std::move(types_));
  }

 private:
  void Add(const RankGroup& group, int parent, double port, size_t level) {
    const std::vector<double> ports = PortsOf(group);
    std::vector<double> latencies;
    for (size_t i = 0; i < group.children.size(); ++i) {
      for (size_t j = i + 1; j < group.children.size(); ++j) {
        latencies.push_back(
            MediansBetween(links_, group.children[i].ranks, group.children[j].ranks).latency_s);
      }
    }
    Link link = {.latency_s = RoundedSeconds(MedianOf(latencies)),
                 .bytes_per_s = RoundedRate(MedianOf(ports))};
    link.full_duplex = group.duplex_ratio == 0 || group.duplex_ratio > kParallelRatio;
    link.shared = group.shared_ratio <= kParallelRatio;
    const int index =
        builder_.AddGroup(parent, level < kLevels.size() ? kLevels[level] : "group", link, port);
    for (size_t i = 0; i < group.children.size(); ++i) {
      const RankGroup& child = group.children[i];
      const double ratio = ports[i] / link.bytes_per_s;
      const double own = ratio > kOwnPort || ratio < 1 / kOwnPort ? RoundedRate(ports[i]) : 0;
      if (child.children.empty()) {
        builder_.AddDevice(index, type_of_rank_[child.ranks[0]], own);
        order_.push_back(child.ranks[0]);
        continue;
      }
      size_t next = level + 1;
      while (next < kLevels.size() && !ShareDomain(child.ranks, places_, next)) ++next;
      Add(child, index, own, next);
    }
  }

  // The bandwidth between two children is that of the slower port, so a port is as fast as its fastest link.
  std::vector<double> PortsOf(const RankGroup& group) const {
    std::vector<double> ports(group.children.size(), 0);
    for (size_t i = 0; i < ports.size(); ++i) {
      for (size_t j = i + 1; j < ports.size(); ++j) {
        const double rate =
            MediansBetween(links_, group.children[i].ranks, group.children[j].ranks).bytes_per_s;
        ports[i] = std::max(ports[i], rate);
        ports[j] = std::max(ports[j], rate);
      }
    }
    // A shared port may be faster than one message.
    if (group.shared_ratio > 1 && group.shared_ratio <= kParallelRatio) {
      for (double& port : ports) port *= group.shared_ratio;
    }
    return ports;
  }

  const LinkMatrix& links_;
  std::span<const RankPlace> places_;
  std::vector<DeviceType> types_;
  std::vector<int> type_of_rank_;
  std::vector<int> order_;  // ranks in the order of devices
  TopologyBuilder builder_;
};

}  // namespace

RankGroup GroupRanks(const LinkMatrix& links, std::span<const RankPlace> places) {
  MOESAIC_CHECK(links.ranks > 0);
  MOESAIC_CHECK_OP(==, std::ssize(places), links.ranks);
  return Clustering(links, places).Run();
}

Topology TopologyOf(const RankGroup& root, const LinkMatrix& links, std::span<const RankPlace> places,
                    const std::string& name, const std::string& origin) {
  return TopologyMaker(links, places).Make(root, name, origin);
}

}  // namespace moesaic::comm
