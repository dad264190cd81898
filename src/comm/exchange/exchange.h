// Dispatch of tokens to the ranks of their routed experts, and combination of the outputs, with the calls of
// DeepEP (normal and low-latency mode). docs/contracts/comm.md has the rules.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "comm/exchange/operation.h"
#include "comm/exchange/row_combine.h"
#include "comm/exchange/row_dispatch.h"

namespace moesaic::comm {

/// Path of one dispatch's rows, which Combine() needs. A later Dispatch() with an equal routing can use it
/// again, which saves the exchange of ids. Copies share the path. Valid until SetDead().
class RouteHandle {
 public:
  RouteHandle() = default;
  bool valid() const { return route_ != nullptr; }
  /// Number of tokens of this rank.
  int64_t tokens() const { return route_->own_rows; }
  /// Number of rows that this rank's experts receive.
  int64_t rows() const { return static_cast<int64_t>(route_->origins.size()); }

 private:
  friend class ExpertExchange;
  friend class Dispatched;
  std::shared_ptr<Route> route_;
  uint32_t epoch_ = 0;
};

/// Rows of this rank's experts. Views are valid while the object, or a copy, lives.
class Dispatched {
 public:
  Payload payload() const { return payload_; }
  int64_t rows() const { return handle_.rows(); }
  /// [rows, hidden], grouped by local expert; within one by source rank, token and slot.
  std::span<const std::byte> data() const { return data_; }
  /// [rows, ScalesPerRow()] of int8 and FP8 rows.
  std::span<const float> scales() const { return scales_; }
  /// [local experts + 1]: first row of each expert.
  std::span<const int64_t> expert_begin() const { return handle_.route_->expert_begin; }
  /// [rows]
  std::span<const RowOrigin> origins() const { return handle_.route_->origins; }
  /// Pairs of this rank's tokens whose experts have no live replica. Combine() leaves them out of the sums.
  std::span<const DroppedPair> dropped() const { return handle_.route_->dropped; }
  const RouteHandle& handle() const { return handle_; }

 private:
  friend class ExpertExchange;
  Payload payload_ = Payload::kF32;
  std::shared_ptr<RowMemory> memory_;
  std::span<const std::byte> data_;
  std::span<const float> scales_;
  RouteHandle handle_;
};

class ExpertExchange;

/// A dispatch or combine that was begun; DeepEP calls it a receive hook. If it is destroyed before its end,
/// its transfers are cancelled, and peers run into their time limits.
template <typename Result>
class PendingExchange {
 public:
  PendingExchange(PendingExchange&&) noexcept = default;
  PendingExchange& operator=(PendingExchange&&) noexcept = default;

  /// Advances all operations of the exchange; never blocks. Returns true when Finish() will not wait: also
  /// after an error, and when a call makes no progress after ExchangeOptions::time_limit_s since the first
  /// one.
  bool Poll();
  /// Waits for the end. Must be called at most once.
  Result Finish();

 private:
  friend class ExpertExchange;
  PendingExchange() = default;
  ExpertExchange* exchange_ = nullptr;
  std::shared_ptr<Operation> operation_;
  double begin_ = -1, last_progress_ = -1;  // times of polls; negative: none
  std::shared_ptr<Route> route_;
  std::shared_ptr<RowMemory> rows_;
};
using PendingDispatch = PendingExchange<StatusOr<Dispatched>>;
using PendingCombine = PendingExchange<Status>;

/// One rank's side of an expert exchange. Ranks call the same operations in the same order; zero tokens are a
/// valid batch. All calls come from the thread of the transport.
///
/// Faults: kUnavailable names a dead rank; kDeadlineExceeded names a rank that sent nothing within the time
/// limit. After either, or after an error on another rank, all live ranks call SetDead() and repeat the
/// dispatch. InvalidArgument for a caller's arguments is returned before anything is sent.
class ExpertExchange {
 public:
  /// Borrows the transport and the topology. InvalidArgument: sizes that do not fit, or options out of range.
  static StatusOr<std::unique_ptr<ExpertExchange>> Create(Transport& transport, const Topology& topology,
                                                          ExpertMap map, int hidden, ExchangeOptions options);

  /// Uses another placement from the next dispatch on; all ranks call it between the same operations. Layers
  /// with placements of their own share one exchange. Combines of earlier dispatches may follow.
  /// FailedPrecondition: a dispatch is in flight. InvalidArgument: the map has other ranks, or too many
  /// replicas.
  Status SetMap(std::shared_ptr<const ExpertMap> map);

  /// Counts the rows that this rank's tokens need. Sends nothing.
  StatusOr<ExchangeLayout> Layout(const TopK& topk);

  /// Throughput mode. `x` is [tokens, hidden] in any payload that can become the dispatch payload
  /// (CanEncode()).
  StatusOr<Dispatched> Dispatch(const PayloadRows& x, const TopK& topk);
  /// The same, but returns after the first messages are posted. `x` is borrowed until Finish().
  StatusOr<PendingDispatch> BeginThroughputDispatch(const PayloadRows& x, const TopK& topk);
  /// Cached mode: rows take the path of an earlier dispatch of any mode, with its weights.
  StatusOr<Dispatched> Dispatch(const PayloadRows& x, const RouteHandle& handle);
  /// Sums expert outputs into `out`. `y` is [handle.rows(), hidden] of kF32 or kBf16, of one payload on all
  /// ranks, and does not overlap `out`.
  Status Combine(const PayloadRows& y, const RouteHandle& handle, const CombineOutput& out);

  /// Low-latency mode: returns after all sends are posted. At most two dispatches are in flight:
  /// FailedPrecondition otherwise. `x` is borrowed until Finish().
  StatusOr<PendingDispatch> BeginDispatch(const PayloadRows& x, const TopK& topk);
  /// Begins a combine of any mode. `y` and `out` are borrowed until Finish().
  StatusOr<PendingCombine> BeginCombine(const PayloadRows& y, const RouteHandle& handle,
                                        const CombineOutput& out);

  /// Excludes exactly these ranks from later operations, and invalidates handles and operations in flight.
  /// All live ranks call it with equal lists, the same number of times. Messages of earlier operations are
  /// ignored, so ranks also call it after an error on one rank. InvalidArgument: the list has this rank or
  /// one out of range.
  Status SetDead(std::span<const int> ranks);

  /// Bytes that this rank sent since ResetTraffic(), for every level of the topology.
  const std::vector<LevelTraffic>& dispatch_traffic() const { return state_.dispatch_traffic.levels(); }
  const std::vector<LevelTraffic>& combine_traffic() const { return state_.combine_traffic.levels(); }
  void ResetTraffic();
  const ExpertMap& map() const { return *state_.map; }

 private:
  template <typename Result>
  friend class PendingExchange;

  ExpertExchange(Transport& transport, const Topology& topology, ExpertMap map, int hidden,
                 ExchangeOptions options);
  Status CheckInput(const PayloadRows& x, int64_t tokens) const;
  Status CheckHandle(const RouteHandle& handle) const;
  StatusOr<std::shared_ptr<RowCombine>> StartCombine(const PayloadRows& y, const RouteHandle& handle,
                                                     const CombineOutput& out);
  /// Advances all operations in flight; true when there was progress.
  bool AdvanceAll();
  Status Wait(Operation& operation);
  /// Ends an operation that waits since `begin` for longer than the time limit, or for a dead rank.
  void FailIfOverdue(Operation& operation, double now, double begin, double last_progress);
  void AddInFlight(const std::shared_ptr<Operation>& operation);
  Dispatched Result(std::shared_ptr<Route> route, std::shared_ptr<RowMemory> rows) const;

  ExchangeState state_;
  std::vector<int> group_of_rank_;  // of the layout's level
  int groups_ = 0;
  TokenRoutes tokens_;
  ReusePool<Route> routes_;
  ReusePool<RowMemory> rows_;
  ReusePool<OperationMemory> memory_;
  std::shared_ptr<FixedBuffers> fixed_[2];
  std::vector<std::weak_ptr<Operation>> in_flight_;
};

}  // namespace moesaic::comm
