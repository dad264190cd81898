// A collective operation as a list of steps for each rank, independent of transport and data. Plans are built
// by plan_*.cc, verified by plan_checker.h, timed by plan_cost.h and run by plan_executor.h.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moesaic::comm {

enum class Collective : uint8_t {
  kBroadcast,
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kAllToAll,
  kAllToAllv,
  kBarrier,
};

enum class PlanBuffer : uint8_t { kInput, kOutput, kScratch };

/// A range of elements of one rank's buffer.
struct Slice {
  PlanBuffer buffer = PlanBuffer::kOutput;
  int64_t offset = 0, count = 0;  // elements
};

/// Encoding of a message. Encodings other than kExact lose precision and are used on request only, between
/// the children of the topology's root.
enum class WireFormat : uint8_t { kExact, kBf16, kInt8 };

struct Message {
  int peer = 0;
  Slice slice;
  WireFormat wire = WireFormat::kExact;
  bool reduce = false;  // receives only: adds the message to the slice instead of overwriting it
  /// Receives that reduce: offset in the input of the other operand, of equal count. The slice then becomes
  /// their sum and need not be initialized. -1: the slice itself is the other operand.
  int64_t addend = -1;
};

struct LocalStep {
  Slice from, to;       // equal counts; of one rank; disjoint, or equal where `wire` is not kExact
  bool reduce = false;  // adds `from` to `to` instead of overwriting it
  /// Encoding that `from` passes through. The sender of a compressed message rounds its own copy like the
  /// receivers.
  WireFormat wire = WireFormat::kExact;
};

/// One round of a stream: its local steps are done in order, and then all its messages are started together.
/// It ends when all have arrived. Received slices are disjoint from each other and from sent ones.
struct Round {
  std::vector<LocalStep> local;
  std::vector<Message> sends, receives;
  int step = 0;  // for estimates: matching messages have equal steps, which ascend within a stream
};

/// Rounds that follow one another. The k-th message from a to b in stream s matches the k-th receive of b
/// from a in its stream s. Streams of a rank run concurrently, in any interleaving.
struct Stream {
  std::vector<Round> rounds;
};

struct RankPlan {
  int64_t scratch = 0;  // elements
  std::vector<Stream> streams;
};

/// Arguments of a plan. Counts are elements:
///   kBroadcast      input of `root` [count] -> output [count]
///   kAllReduce      input [count] -> output [count]
///   kReduceScatter  input [sum(counts)] -> output [counts[rank]]
///   kAllGather      input [counts[rank]] -> output [sum(counts)], in the order of ranks
///   kAllToAll       input [ranks * count] -> output [ranks * count]
///   kAllToAllv      matrix[from * ranks + to]; input and output are ordered by the peer's rank, without gaps
struct PlanRequest {
  Collective collective = Collective::kAllReduce;
  int ranks = 1;
  int root = 0;
  int64_t count = 0;
  std::vector<int64_t> counts = {};  // [ranks]
  std::vector<int64_t> matrix = {};  // [ranks * ranks]
  int element_bytes = 4;             // for costs
};

struct Plan {
  PlanRequest request;
  std::string algorithm;  // for logs and explanations: "ring", "hierarchical (node: ring, cluster: halving)"
  std::vector<RankPlan> ranks;
};

/// Returns the name for messages and tables, such as "all_reduce".
std::string_view Name(Collective collective);
/// The reverse of Name().
StatusOr<Collective> CollectiveOf(std::string_view name);
std::string_view Name(PlanBuffer buffer);
std::string_view Name(WireFormat wire);

/// InvalidArgument for negative counts, counts of 2^63 bytes or more in all, a root out of range, or vectors
/// of a wrong length.
Status ValidateRequest(const PlanRequest& request);
/// Returns the number of elements of a rank's input or output.
int64_t InputCount(const PlanRequest& request, int rank);
int64_t OutputCount(const PlanRequest& request, int rank);

}  // namespace moesaic::comm
