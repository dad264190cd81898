// Builds the tree of a Topology group by group.
#pragma once

#include <string>
#include <vector>

#include "comm/topology/topology.h"

namespace moesaic::comm {

class TopologyBuilder {
 public:
  /// Adds a group below `parent`, which is -1 for the root, and returns its number. `port_bytes_per_s` of 0
  /// takes the bandwidth of the parent's link.
  int AddGroup(int parent, const std::string& level, const Link& link, double port_bytes_per_s);
  /// Adds a device, which is the next rank.
  int AddDevice(int parent, int type, double port_bytes_per_s);

  /// Returns the number of groups, devices included.
  int groups() const { return static_cast<int>(topology_.groups_.size()); }
  int devices() const { return static_cast<int>(topology_.leaf_of_rank_.size()); }

  /// Completes the topology. `order`, where not empty, has the device of each rank, in the order of
  /// AddDevice().
  Topology Finish(std::string name, std::string origin, std::vector<DeviceType> types,
                  const std::vector<int>& order = {});

 private:
  int Add(int parent, const std::string& level, double port_bytes_per_s);
  void AddChannels(int group);

  Topology topology_;
};

}  // namespace moesaic::comm
