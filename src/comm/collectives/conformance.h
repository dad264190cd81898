// Conformance of collectives on a transport, against brute force. It is free of a test framework, so programs
// of any launcher can run it. Ranks may be threads or processes.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/status.h"
#include "comm/transport/transport.h"

namespace moesaic::comm {

struct ConformanceOptions {
  /// Largest number of elements of a vector.
  int64_t max_count = (1 << 20) + 3;
  /// Each (collective, algorithm, group shape) runs with this many sizes; samples differ from one to the
  /// next.
  int sizes = 2;
  double time_limit_s = 60;
  /// Tags, as in CommunicatorOptions.
  uint32_t first_tag = 0;
};

struct ConformanceReport {
  int64_t runs = 0;  ///< collectives that were run and compared
  int64_t failures = 0;
  Status first_failure;  ///< names the collective, plan, size and element
};

/// Runs every algorithm of every collective on every group shape of transport.size() ranks, with sampled
/// sizes, types and operations, then the planner's choices through blocking and asynchronous calls. All ranks
/// call it together.
ConformanceReport CheckCollectives(Transport& transport, const ConformanceOptions& options = {});

/// Runs a body on each of N ranks and returns after all have ended.
using RankRunner = std::function<void(int ranks, const std::function<void(Transport&)>& body)>;

/// Runs CheckCollectives() with 1 to `max_ranks` ranks. Returns the first failure of any rank; `*runs`, if
/// not null, becomes the number of collectives that a rank has run. Ranks are threads of this process.
Status CheckCollectivesOn(const RankRunner& runner, int max_ranks, const ConformanceOptions& options = {},
                          int64_t* runs = nullptr);

}  // namespace moesaic::comm
