// Calls of a communicator that are in flight, and its plans.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm/collectives/communicator.h"
#include "comm/collectives/plan_executor.h"

namespace moesaic::comm {

// Arguments of a call, as ranks compare them. Trivially copyable without padding.
struct CallRecord {
  uint32_t sequence = 0;
  uint16_t collective = 0;
  uint8_t dtype = 0, op = 0;
  int32_t root = 0;
  uint32_t reserved = 0;
  int64_t count = 0;
  uint64_t counts_hash = 0;  // of counts that all ranks share
};
static_assert(sizeof(CallRecord) == 32);

struct CacheKey {
  Collective collective;
  tensor::DType dtype;
  ReduceOp op;
  int root;
  int64_t count;
  std::vector<int64_t> counts;  // also the matrix
  auto operator<=>(const CacheKey&) const = default;
};

struct CachedPlan {
  CacheKey key;
  std::shared_ptr<const Plan> plan;
  ReduceKernel kernel = nullptr;
  std::vector<std::unique_ptr<PlanExecutor>> idle;
  // Size of the vector if the plan is one message each way between two ranks and a sum; otherwise 0.
  size_t exchange_bytes = 0;
};

// A call in flight. Its phases follow one another: comparison of calls, exchange of counts, plan.
struct PendingCall {
  enum class Phase : uint8_t { kCheck, kCounts, kPlan, kEnded };

  Phase phase = Phase::kPlan;
  CollectiveHandle* handle = nullptr;  // null: the caller has none
  PlanRequest request;
  tensor::DType dtype = tensor::DType::kF32;
  ReduceOp op = ReduceOp::kSum;
  std::span<const std::byte> input;
  std::span<std::byte> output;
  uint32_t number = 0;  // of the communicator's calls
  Tag tag = 0;
  double deadline = 0;
  double dead_since = -1;  // when a dead rank was noticed
  uint64_t polls = 0;
  Status result;

  std::shared_ptr<CachedPlan> cached;  // null for a plan of the caller
  std::unique_ptr<PlanExecutor> executor;
  std::vector<std::byte> copy;  // input of an AllReduce in place

  // Comparison of calls: own record, then one per rank.
  CallRecord record;
  std::vector<CallRecord> records;
  // AllToAllv: own counts and output size, then those of all ranks.
  std::vector<int64_t> counts;
  std::vector<int64_t> all_counts;  // [ranks][ranks + 1]
  std::span<int64_t> received;

  struct Transfer {
    TransferId id;
    int peer = 0;
    bool busy = false;
  };
  std::vector<Transfer> transfers;
};

struct Communicator::State {
  State(Transport& used, Topology topology, CommunicatorOptions chosen)
      : transport(used), options(std::move(chosen)), planner(std::move(topology), options.planner) {}

  Transport& transport;
  CommunicatorOptions options;
  Planner planner;
  uint32_t sequence = 0;
  std::list<std::shared_ptr<CachedPlan>> cache;     // most recent first
  std::vector<std::unique_ptr<PendingCall>> calls;  // in flight
  std::vector<std::unique_ptr<PendingCall>> idle_calls;
  int rank = 0, ranks = 1;
  std::vector<std::byte> exchange_term;  // the peer's term of TryExchange() in place

  PlanMode mode() const { return {options.deterministic, options.compression}; }

  // Returns the cached plan of a request, or makes it.
  StatusOr<std::shared_ptr<CachedPlan>> FindPlan(const PlanRequest& request, tensor::DType dtype,
                                                 ReduceOp op);
  // Runs an AllReduce without a PendingCall, if the last call had an equal plan, which is one exchange, and
  // no call is in flight. Returns nullopt, before any effect, where Begin() must be used.
  std::optional<Status> TryExchange(std::span<const std::byte> input, std::span<std::byte> output,
                                    tensor::DType dtype, ReduceOp op);
  // Frees the scratch of the least recent plans beyond CommunicatorOptions::idle_bytes.
  void TrimIdle();
  bool has_large = false;  // an executor with more than an equal share of idle_bytes has run
  Tag TagOfCall() const;
  // Error of a call that took longer than the time limit. `waiting` lists the peers that did not answer.
  Status TimeLimitError(Collective collective, uint32_t number, const std::string& waiting) const;
  // Checks the arguments of a call and starts its first phase. Owned by `calls` until Release().
  StatusOr<PendingCall*> Begin(PlanRequest request, std::span<const std::byte> input,
                               std::span<std::byte> output, tensor::DType dtype, ReduceOp op,
                               std::span<const int64_t> counts = {}, std::span<int64_t> received = {});
  // Appends a call to `calls` whose other members are as after construction.
  PendingCall& NewCall(PlanRequest request, std::span<const std::byte> input, std::span<std::byte> output,
                       tensor::DType dtype, ReduceOp op);
  Status StartPlan(PendingCall& call);
  // All ranks send `own` to all others; `all` receives them in the order of ranks.
  template <typename T>
  Status StartExchange(PendingCall& call, Tag stream, std::span<const T> own, std::vector<T>* all);
  // True when the messages of StartExchange() have arrived.
  StatusOr<bool> AdvanceExchange(PendingCall& call);
  // Ends the phases kCheck and kCounts: compares what arrived and starts the next phase.
  Status OnRecords(PendingCall& call);
  Status OnCounts(PendingCall& call);
  // Advances the phases of a call; true when it has ended well.
  StatusOr<bool> Step(PendingCall& call);
  // Like Step(), with the time limit and dead ranks; true when the call has ended, well or not.
  bool Advance(PendingCall& call);
  void AdvanceAll();
  // Cancels what is in flight and keeps the result for the handle.
  void End(PendingCall& call, Status result);
  void Release(PendingCall* call);
  // Advances all calls until `call` has ended, and releases it.
  Status Wait(PendingCall* call);
};

}  // namespace moesaic::comm
