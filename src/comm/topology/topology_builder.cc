#include "comm/topology/topology_builder.h"

#include <utility>

namespace moesaic::comm {

int TopologyBuilder::Add(int parent, const std::string& level, double port_bytes_per_s) {
  const int index = groups();
  Group group;
  group.level = level;
  group.name = level;
  group.parent = parent;
  if (parent >= 0) {
    Group& above = topology_.groups_[parent];
    group.name = fmt::format("{}/{} {}", above.name, level, above.children.size());
    group.port_bytes_per_s = port_bytes_per_s > 0 ? port_bytes_per_s : above.link.bytes_per_s;
    above.children.push_back(index);
  }
  topology_.groups_.push_back(std::move(group));
  return index;
}

int TopologyBuilder::AddGroup(int parent, const std::string& level, const Link& link,
                              double port_bytes_per_s) {
  const int index = Add(parent, level, port_bytes_per_s);
  topology_.groups_[index].link = link;
  return index;
}

int TopologyBuilder::AddDevice(int parent, int type, double port_bytes_per_s) {
  const int index = Add(parent, "device", port_bytes_per_s);
  topology_.groups_[index].device_type = type;
  topology_.leaf_of_rank_.push_back(index);
  return index;
}

void TopologyBuilder::AddChannels(int group) {
  const Group& own = topology_.groups_[group];
  topology_.first_channel_.push_back(own.parent < 0 ? -1 : static_cast<int>(topology_.channels_.size()));
  if (own.parent < 0) return;
  const Link& link = topology_.groups_[own.parent].link;
  const auto add_port = [&](int rank) {
    topology_.channels_.push_back({own.port_bytes_per_s, group, rank, true});
    if (link.full_duplex) topology_.channels_.push_back({own.port_bytes_per_s, group, rank, false});
  };
  if (link.shared) {
    add_port(-1);
  } else {
    for (const int rank : own.ranks) add_port(rank);
  }
}

Topology TopologyBuilder::Finish(std::string name, std::string origin, std::vector<DeviceType> types,
                                 const std::vector<int>& order) {
  topology_.name_ = std::move(name);
  topology_.origin_ = std::move(origin);
  topology_.device_types_ = std::move(types);
  if (!order.empty()) {
    std::vector<int> leaves;
    leaves.reserve(order.size());
    for (const int device : order) leaves.push_back(topology_.leaf_of_rank_[device]);
    topology_.leaf_of_rank_ = std::move(leaves);
  }
  for (int rank = 0; rank < devices(); ++rank) {
    for (int g = topology_.leaf_of_rank_[rank]; g >= 0; g = topology_.groups_[g].parent) {
      topology_.groups_[g].ranks.push_back(rank);
    }
  }
  for (int g = 0; g < groups(); ++g) AddChannels(g);
  return std::exchange(topology_, Topology());
}

}  // namespace moesaic::comm
