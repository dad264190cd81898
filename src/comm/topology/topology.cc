#include "comm/topology/topology.h"

#include <algorithm>
#include <limits>

#include "base/check.h"
#include "comm/topology/topology_builder.h"

namespace moesaic::comm {

Topology Topology::Flat(int ranks, Link link) {
  MOESAIC_CHECK_LT(0, ranks);
  TopologyBuilder builder;
  builder.AddGroup(-1, "group", link, 0);
  for (int i = 0; i < ranks; ++i) builder.AddDevice(0, 0, 0);
  return builder.Finish("flat", "none: equal devices", {DeviceType{.name = "device", .flops = {}}});
}

StatusOr<Topology> Topology::Selected(std::span<const int> chosen) const {
  if (chosen.empty()) return InvalidArgument("a selection needs at least one rank");
  std::vector<int> place(ranks(), -1);  // rank of this topology -> rank of the selection
  for (size_t i = 0; i < chosen.size(); ++i) {
    const int rank = chosen[i];
    if (rank < 0 || rank >= ranks()) {
      return InvalidArgument("topology {} has ranks 0 to {}; selected rank: {}", name_, ranks() - 1, rank);
    }
    if (place[rank] >= 0) return InvalidArgument("a rank may be selected once; selected twice: {}", rank);
    place[rank] = static_cast<int>(i);
  }
  TopologyBuilder builder;
  std::vector<int> device_of_rank(chosen.size());
  std::vector<int> copy(groups_.size(), -1);
  for (size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    const auto is_chosen = [&](int rank) { return place[rank] >= 0; };
    if (std::none_of(group.ranks.begin(), group.ranks.end(), is_chosen)) continue;
    const int parent = group.parent < 0 ? -1 : copy[group.parent];
    if (group.device_type < 0) {
      copy[g] = builder.AddGroup(parent, group.level, group.link, group.port_bytes_per_s);
    } else {
      device_of_rank[place[group.ranks[0]]] = builder.devices();
      copy[g] = builder.AddDevice(parent, group.device_type, group.port_bytes_per_s);
    }
  }
  return builder.Finish(name_, origin_, device_types_, device_of_rank);
}

const DeviceType& Topology::device_type(int rank) const {
  return device_types_[groups_[leaf_of_rank_[rank]].device_type];
}

int Topology::CommonGroup(int a, int b) const {
  // A parent has a smaller number than its children, so the larger one is never a common ancestor of both.
  int x = leaf_of_rank_[a], y = leaf_of_rank_[b];
  while (x != y) {
    if (x > y) {
      x = groups_[x].parent;
    } else {
      y = groups_[y].parent;
    }
  }
  return x;
}

double Topology::Latency(int a, int b) const {
  return a == b ? 0 : groups_[CommonGroup(a, b)].link.latency_s;
}

double Topology::PortLatency(int group) const {
  double latency_s = std::numeric_limits<double>::infinity();
  for (int above = groups_[group].parent; above >= 0; above = groups_[above].parent) {
    // A group with one child connects nothing.
    if (groups_[above].children.size() > 1) latency_s = std::min(latency_s, groups_[above].link.latency_s);
  }
  return latency_s;
}

int Topology::ChannelOf(int group, int rank, bool up) const {
  const Group& own = groups_[group];
  const Link& link = groups_[own.parent].link;
  int port = 0;
  if (!link.shared) {
    const auto at = std::lower_bound(own.ranks.begin(), own.ranks.end(), rank);
    port = static_cast<int>(at - own.ranks.begin());
  }
  return link.full_duplex ? first_channel_[group] + 2 * port + (up ? 0 : 1) : first_channel_[group] + port;
}

std::vector<int> Topology::Path(int from, int to) const {
  std::vector<int> path;
  if (from == to) return path;
  const int top = CommonGroup(from, to);
  for (int g = leaf_of_rank_[from]; g != top; g = groups_[g].parent) path.push_back(ChannelOf(g, from, true));
  const size_t turn = path.size();
  for (int g = leaf_of_rank_[to]; g != top; g = groups_[g].parent) path.push_back(ChannelOf(g, to, false));
  std::reverse(path.begin() + static_cast<std::ptrdiff_t>(turn), path.end());
  return path;
}

double Topology::Bandwidth(int from, int to) const {
  double slowest = std::numeric_limits<double>::infinity();
  for (const int channel : Path(from, to)) slowest = std::min(slowest, channels_[channel].bytes_per_s);
  return slowest;
}

int Topology::depth() const {
  std::vector<int> levels(groups_.size(), 0);  // below the root down to the group, itself included
  int deepest = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    levels[g] =
        (groups_[g].parent < 0 ? 0 : levels[groups_[g].parent]) + (groups_[g].children.size() > 1 ? 1 : 0);
    deepest = std::max(deepest, levels[g]);
  }
  return deepest;
}

}  // namespace moesaic::comm
