// Measures the links between all ranks of a job.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "base/status.h"
#include "comm/topology/topology.h"
#include "comm/transport/transport.h"

namespace moesaic::comm {

struct ProbeOptions {
  int64_t large_bytes = 4 << 20;
  double pair_s = 0.05;      ///< time spent on each measurement of one pair, at least three messages
  double time_limit_s = 60;  ///< for one measurement
  std::string name = "probed";
  /// Called on rank 0; false stops the probe with kCancelled.
  std::function<bool(int done, int total)> progress = {};
};

/// All ranks of the transport call it. Rank 0 returns the topology that was measured, the others return
/// nothing. Pairs take turns, the other ranks wait. kUnavailable names a rank that died, kDeadlineExceeded
/// one that does not answer.
StatusOr<std::optional<Topology>> ProbeLinks(Transport& transport, const ProbeOptions& options);

/// Measures links between `ranks` hardware threads of this machine, each bound to one; those of different
/// cores come first. InvalidArgument for more ranks than hardware threads that the process may use.
StatusOr<Topology> ProbeThreads(int ranks, const ProbeOptions& options);

}  // namespace moesaic::comm
