// Model of a machine or cluster: a tree of groups (rack, node, socket, PCIe switch, card) whose leaves are
// devices. The file format is described in docs/communication.md; docs/contracts/comm.md has the rules.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moesaic::comm {

/// Connection of a group's children: each child has a port to a switch that is never a bottleneck
/// itself.
struct Link {
  double latency_s = 0;     ///< Time of an empty message between devices of two children, end to end.
  double bytes_per_s = 0;   ///< Bandwidth of one port, per direction.
  bool full_duplex = true;  ///< False: both directions of a port share its bandwidth.
  bool shared = true;       ///< True: one port per child. False: one port per device below the child.
};

/// Kind of a device. Rates are 0 where they are unknown.
struct DeviceType {
  std::string name;
  std::map<std::string, double> flops;  ///< FLOP/s by dtype: "f32", "bf16", "fp8", "int8".
  double memory_bytes_per_s = 0;
  double memory_bytes = 0;
};

/// A node of the tree. Group 0 is the root; a parent precedes its children.
struct Group {
  std::string level;  ///< "node", "socket", "card", ...; "device" for leaves
  std::string name;   ///< path for messages: "cluster/node 1/card 3"
  int parent = -1;
  std::vector<int> children;  ///< groups; empty for leaves
  std::vector<int> ranks;     ///< all ranks below, ascending
  int device_type = -1;       ///< leaves only
  Link link;                  ///< between children; unused for leaves
  /// Bandwidth of the group's port to the parent's switch, or of each device's port if ports are not shared.
  double port_bytes_per_s = 0;
};

/// A port in one direction, the unit of contention. Half-duplex ports have one channel for both directions.
struct Channel {
  double bytes_per_s = 0;
  int group = -1;  ///< child whose port it is
  int rank = -1;   ///< device whose port it is, where ports are not shared; otherwise -1
  bool up = true;  ///< direction; true for half-duplex ports
};

/// Ranks placed on the devices of a tree. Immutable; safe to read from any thread.
class Topology {
 public:
  /// Reads a file's text; `source` is its name in messages. Rank i is on device i, in the order of the tree.
  /// InvalidArgument names the path of the faulty value ("tree.children[2].count: must be positive, found
  /// 0").
  static StatusOr<Topology> Parse(std::string_view json, const std::string& source);
  /// InvalidArgument for a name that files cannot have: empty, not UTF-8, or with control characters.
  static Status CheckName(const std::string& name);
  /// Returns a topology with one group of `ranks` equal devices.
  static Topology Flat(int ranks, Link link);

  /// Returns the file's text; Parse() of it gives an equal topology (of Selected() ones: in tree order).
  std::string ToJson() const;
  /// Returns the topology whose rank i is rank `ranks[i]` of this topology. Devices that are not named, and
  /// groups that become empty, are dropped. InvalidArgument for numbers that are out of range or repeated.
  StatusOr<Topology> Selected(std::span<const int> ranks) const;

  const std::string& name() const { return name_; }
  const std::string& origin() const { return origin_; }  ///< "source" of the file: origin of its values
  int ranks() const { return static_cast<int>(leaf_of_rank_.size()); }
  const std::vector<Group>& groups() const { return groups_; }
  const std::vector<DeviceType>& device_types() const { return device_types_; }
  const std::vector<Channel>& channels() const { return channels_; }
  const DeviceType& device_type(int rank) const;

  /// Returns the smallest group that contains both ranks.
  int CommonGroup(int a, int b) const;
  /// Returns the latency of a message in seconds; 0 when a == b.
  double Latency(int a, int b) const;
  /// Returns the smallest latency of a message that passes the port of `group`, not the root, in seconds.
  double PortLatency(int group) const;
  /// Returns the channels that a message from `from` to `to` occupies, from the sender's side on. Empty when
  /// from == to.
  std::vector<int> Path(int from, int to) const;
  /// Returns the bandwidth of an otherwise idle path in bytes per second: the slowest channel's. Infinite
  /// when from == to.
  double Bandwidth(int from, int to) const;
  /// Returns the number of levels with more than one child: 1 for a flat group.
  int depth() const;
  /// Returns the channel of the port of `group`, not the root, that messages from (up) or to `rank` pass.
  int ChannelOf(int group, int rank, bool up) const;
  /// Returns the leaf of a rank's device.
  int leaf(int rank) const { return leaf_of_rank_[rank]; }

 private:
  friend class TopologyBuilder;

  std::string name_, origin_;
  std::vector<Group> groups_;
  std::vector<DeviceType> device_types_;
  std::vector<Channel> channels_;
  std::vector<int> leaf_of_rank_;   // [ranks] groups
  std::vector<int> first_channel_;  // [groups] -1 for the root
};

}  // namespace moesaic::comm
