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
  /// Each (collective, algorithm, group shape) runs with this many samples of size and type, which differ
  /// from one to the next.
  int samples = 2;
  /// Chooses the samples.
  uint64_t seed = 0;
  /// Runs all sizes and types instead of samples. Sizes over kLargeCount take one type each, in turn, with
  /// more than kFewRanks ranks.
  bool is_whole = false;
  double time_limit_s = 60;
  /// Tags, as in CommunicatorOptions.
  uint32_t first_tag = 0;
};

/// Larger counts run with few types or few ranks.
inline constexpr int64_t kLargeCount = 20011;
inline constexpr int kFewRanks = 3;

/// Returns the options of a test with `ranks` ranks. MOESAIC_CONFORMANCE=whole in the environment selects all
/// sizes and types, and a number there is the seed of the samples. Large vectors run with at most
/// `large_ranks` ranks, or 5 of the whole product.
ConformanceOptions ConformanceOf(int ranks, int large_ranks);

struct ConformanceReport {
  int64_t runs = 0;  ///< collectives that were run and compared
  int64_t failures = 0;
  Status first_failure;  ///< names the collective, plan, size and element
};

/// Runs every algorithm of every collective on every group shape of transport.size() ranks (one level, 1 + 3,
/// 2 + 2 + 1, groups whose ports differ in bandwidth, three levels), with sampled or all sizes and types and
/// sampled operations, then sums with lossy encodings, which must be within the bound of rule C12
/// (docs/contracts/comm.md) and equal on all ranks, and the planner's choices through blocking and
/// asynchronous calls. All ranks call it together.
ConformanceReport CheckCollectives(Transport& transport, const ConformanceOptions& options = {});

/// Runs a body on each of N ranks and returns after all have ended.
using RankRunner = std::function<void(int ranks, const std::function<void(Transport&)>& body)>;

/// Runs CheckCollectives() with 1 to `max_ranks` ranks, which are threads of this process, and the options
/// that ConformanceOf() returns for `large_ranks`. Returns the first failure of any rank; `*runs`, if not
/// null, becomes the number of collectives that rank 0 has run.
Status CheckCollectivesOn(const RankRunner& runner, int max_ranks, int large_ranks, int samples,
                          int64_t* runs = nullptr);

}  // namespace moesaic::comm
