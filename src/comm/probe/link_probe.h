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
  /// Target duration of one measurement, which has at least three messages.
  double pair_s = 0.05;
  /// Limit of each wait within a measurement.
  double time_limit_s = 60;
  /// Name of the topology. Topology::CheckName() must accept it.
  std::string name = "probed";
  /// Called on rank 0 before each pair; false stops the probe on all ranks. Rank 0 returns kCancelled.
  std::function<bool(int done, int total)> progress = {};
  /// Called repeatedly on other ranks while they wait for rank 0; true ends the probe on that rank with
  /// kCancelled.
  std::function<bool()> interrupted = {};
};

/// All ranks of the transport call it. Rank 0 returns the topology that was measured, the others return
/// nothing. Pairs take turns, the other ranks wait. kUnavailable names a rank that died, kDeadlineExceeded
/// one that does not answer. A rank waits for rank 0 no longer than all measurements may take.
StatusOr<std::optional<Topology>> ProbeLinks(Transport& transport, const ProbeOptions& options);

/// Measures links between `ranks` hardware threads of this machine, each bound to one; those of different
/// cores come first. InvalidArgument for more ranks than hardware threads that the process may use.
StatusOr<Topology> ProbeThreads(int ranks, const ProbeOptions& options);

}  // namespace moesaic::comm
