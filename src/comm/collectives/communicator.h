// Collective operations of one rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/status.h"
#include "comm/collectives/planner.h"
#include "comm/collectives/reduce_kernels.h"
#include "comm/topology/topology.h"
#include "comm/transport/transport.h"
#include "tensor/dtype.h"

namespace moesaic::comm {

/// Number of low bits of a tag that a communicator uses: its tags begin at CommunicatorOptions::first_tag.
inline constexpr int kCommunicatorTagBits = 24;

/// Largest number of ranks. Each rank plans for all of them: a plan of 512 ranks takes seconds and 400 MB,
/// and that of twice as many four times as much.
inline constexpr int kMaxCommunicatorRanks = 512;

/// Returns true in libraries that are built without NDEBUG.
bool ChecksCallsByDefault();

struct CommunicatorOptions {
  /// A call that takes longer ends with kDeadlineExceeded.
  double time_limit_s = 60;
  /// Reductions add in the order of ranks: results do not depend on the topology or on the order of arrival.
  bool deterministic = false;
  /// Encoding of F32 sums between the groups of the topology's root, or between all ranks if there are no
  /// groups. It is used where the planner expects it to be faster. wire_codec.h and rule C12 of
  /// docs/contracts/comm.md state its error. Excludes `deterministic`.
  WireFormat compression = WireFormat::kExact;
  /// Ranks compare their calls before each operation. If calls differ, the error names a rank with another
  /// call. Costs one message to each rank.
  bool check_calls = ChecksCallsByDefault();
  /// Maximum bytes of scratch that plans other than the last one keep for their next call.
  int64_t idle_bytes = int64_t{256} << 20;
  /// A multiple of 2^kCommunicatorTagBits. Communicators of one transport need different ranges.
  Tag first_tag = 0;
  PlannerOptions planner;
};

class Communicator;
struct PendingCall;

/// A call that was started. Dropping the handle cancels the call. The communicator's destructor cancels it as
/// well, and the handle is empty afterwards. Used by the communicator's thread.
class CollectiveHandle {
 public:
  CollectiveHandle() = default;
  CollectiveHandle(CollectiveHandle&& other) noexcept;
  CollectiveHandle& operator=(CollectiveHandle&& other) noexcept;
  ~CollectiveHandle();

  /// Advances all calls of the communicator. Returns true when this call has ended; `*result` is then its
  /// status.
  bool Test(Status* result);
  /// Waits for the end of the call.
  Status Wait();
  /// Ends the call: its buffers are not touched after this returns. Other ranks run into their time limit,
  /// unless they cancel the call, too.
  void Cancel();
  /// Returns whether the handle has a call whose end was not reported.
  bool valid() const { return call_ != nullptr; }

 private:
  friend class Communicator;
  CollectiveHandle(Communicator* owner, PendingCall* call);
  void TakeFrom(CollectiveHandle& other);

  Communicator* owner_ = nullptr;
  PendingCall* call_ = nullptr;
};

/// Collective operations among all ranks of a transport. Every rank makes the same calls in the same order,
/// with the same options and topology. Counts are elements. All buffers are borrowed until the call ends, and
/// inputs must not overlap outputs, except that an AllReduce takes one buffer as both. Used by one thread at
/// a time.
///
/// Errors are InvalidArgument for buffers that overlap or have a wrong size, kUnavailable for a dead peer,
/// and kDeadlineExceeded. Each is returned on the ranks that it concerns, and later calls work.
class Communicator {
 public:
  /// Borrows the transport. Rank i of the transport is rank i of the topology.
  static StatusOr<std::unique_ptr<Communicator>> Create(Transport& transport, Topology topology,
                                                        CommunicatorOptions options = {});
  ~Communicator();

  int rank() const;
  int size() const;
  const Topology& topology() const;
  Transport& transport() const;

  /// Sets the output to the reduction of all inputs. All buffers have equal sizes.
  Status AllReduce(std::span<const std::byte> input, std::span<std::byte> output, tensor::DType dtype,
                   ReduceOp op = ReduceOp::kSum);
  /// Reduces inputs of sum(counts) elements. Rank r's output is the r-th part of the result, of counts[r]
  /// elements.
  Status ReduceScatter(std::span<const std::byte> input, std::span<std::byte> output,
                       std::span<const int64_t> counts, tensor::DType dtype, ReduceOp op = ReduceOp::kSum);
  /// Sets the output to all inputs in the order of ranks. Rank r's input has counts[r] elements.
  Status AllGather(std::span<const std::byte> input, std::span<std::byte> output,
                   std::span<const int64_t> counts, tensor::DType dtype);
  /// Sends part p of the input, one of size() equal parts, to rank p, where it becomes part rank() of the
  /// output.
  Status AllToAll(std::span<const std::byte> input, std::span<std::byte> output, tensor::DType dtype);
  /// Sends counts[p] elements of the input to each rank p, in the order of ranks. Sets the beginning of the
  /// output to the received elements, in the order of ranks, and `received` to their counts. Ranks exchange
  /// counts first. If the output of a rank is too small, every rank returns an InvalidArgument that names it.
  Status AllToAllv(std::span<const std::byte> input, std::span<const int64_t> counts,
                   std::span<std::byte> output, std::span<int64_t> received, tensor::DType dtype);
  /// Sets the output to the root's input. Inputs of other ranks are not read.
  Status Broadcast(std::span<const std::byte> input, std::span<std::byte> output, int root,
                   tensor::DType dtype);
  /// Returns after all ranks have called it.
  Status Barrier();

  /// Start the same operations without waiting. A call advances in Test(), Wait() and Progress(), and in
  /// every blocking call.
  StatusOr<CollectiveHandle> StartAllReduce(std::span<const std::byte> input, std::span<std::byte> output,
                                            tensor::DType dtype, ReduceOp op = ReduceOp::kSum);
  StatusOr<CollectiveHandle> StartReduceScatter(std::span<const std::byte> input, std::span<std::byte> output,
                                                std::span<const int64_t> counts, tensor::DType dtype,
                                                ReduceOp op = ReduceOp::kSum);
  StatusOr<CollectiveHandle> StartAllGather(std::span<const std::byte> input, std::span<std::byte> output,
                                            std::span<const int64_t> counts, tensor::DType dtype);
  StatusOr<CollectiveHandle> StartAllToAll(std::span<const std::byte> input, std::span<std::byte> output,
                                           tensor::DType dtype);
  /// `counts` is copied; `received` is borrowed like the output.
  StatusOr<CollectiveHandle> StartAllToAllv(std::span<const std::byte> input, std::span<const int64_t> counts,
                                            std::span<std::byte> output, std::span<int64_t> received,
                                            tensor::DType dtype);
  StatusOr<CollectiveHandle> StartBroadcast(std::span<const std::byte> input, std::span<std::byte> output,
                                            int root, tensor::DType dtype);
  StatusOr<CollectiveHandle> StartBarrier();

  /// Advances all calls that were started.
  void Progress();

  /// Runs a plan of the caller, for tests and measurements. It is not checked.
  Status Run(std::shared_ptr<const Plan> plan, std::span<const std::byte> input, std::span<std::byte> output,
             tensor::DType dtype, ReduceOp op = ReduceOp::kSum);

 private:
  friend class CollectiveHandle;
  struct State;
  explicit Communicator(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace moesaic::comm
