#include "comm/exchange/exchange.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "comm/transport/buffer_overlap.h"

namespace moesaic::comm {
namespace {

// A rank that makes no progress reports a dead rank after this time, even one that it exchanges no messages
// with: a rank between them may have stopped. It is long enough for a rank that ended its work to leave
// without being reported.
constexpr double kFaultGraceS = 0.25;

Status CheckOptions(const Transport& transport, const Topology& topology, const ExpertMap& map, int hidden,
                    const ExchangeOptions& options) {
  if (topology.ranks() != transport.size()) {
    return InvalidArgument("exchange: the job has {} ranks, the topology {}", transport.size(),
                           topology.ranks());
  }
  if (map.ranks() != transport.size()) {
    return InvalidArgument("exchange: the job has {} ranks, the expert map {}", transport.size(),
                           map.ranks());
  }
  if (transport.size() > kMaxExchangeRanks) {
    return InvalidArgument("exchange: at most {} ranks are supported, found {}", kMaxExchangeRanks,
                           transport.size());
  }
  if (map.physical_experts() > kMaxPhysicalExperts) {
    return InvalidArgument("exchange: at most {} expert replicas are supported, found {}",
                           kMaxPhysicalExperts, map.physical_experts());
  }
  if (hidden < 1) return InvalidArgument("exchange: hidden size must be positive, found {}", hidden);
  if (options.combine_payload != Payload::kF32 && options.combine_payload != Payload::kBf16) {
    return InvalidArgument("exchange: combine payload must be f32 or bf16, found {}",
                           PayloadName(options.combine_payload));
  }
  if (options.segment_tokens < 1) {
    return InvalidArgument("exchange: segment_tokens must be positive, found {}", options.segment_tokens);
  }
  if (options.low_latency_tokens < 1 || options.low_latency_slots < 0 ||
      options.low_latency_slots > kMaxTopK) {
    return InvalidArgument(
        "exchange: low-latency buffers need tokens >= 1 and slots in [0, {}], found {} and {}", kMaxTopK,
        options.low_latency_tokens, options.low_latency_slots);
  }
  if (!(options.time_limit_s > 0)) {
    return InvalidArgument("exchange: the time limit must be positive, found {} s", options.time_limit_s);
  }
  if (options.first_tag % (Tag{1} << kExchangeTagBits) != 0 ||
      options.first_tag > kTagLimit - (Tag{1} << kExchangeTagBits)) {
    return InvalidArgument("exchange: first_tag must be a multiple of 2^{} below 2^30, found {}",
                           kExchangeTagBits, options.first_tag);
  }
  for (const std::string& level : options.forward_levels) {
    int groups = 0;
    RETURN_IF_ERROR(GroupOfRank(topology, level, &groups).status());
  }
  return OkStatus();
}

}  // namespace

ExpertExchange::ExpertExchange(Transport& transport, const Topology& topology, ExpertMap map, int hidden,
                               ExchangeOptions options)
    : state_(transport, topology, std::make_shared<const ExpertMap>(std::move(map)), hidden,
             std::move(options)) {}

StatusOr<std::unique_ptr<ExpertExchange>> ExpertExchange::Create(Transport& transport,
                                                                 const Topology& topology, ExpertMap map,
                                                                 int hidden, ExchangeOptions options) {
  RETURN_IF_ERROR(CheckOptions(transport, topology, map, hidden, options));
  std::unique_ptr<ExpertExchange> made(
      new ExpertExchange(transport, topology, std::move(map), hidden, std::move(options)));
  ExchangeState& state = made->state_;
  if (state.options.forwarding == Forwarding::kHierarchical) {
    state.tree = RouteTree::Hierarchical(topology, state.dead, state.options.forward_levels);
  }
  if (state.tree.phases() > kMaxExchangePhases) {
    return InvalidArgument(
        "exchange: at most {} levels can forward rows, name some in forward_levels; found {}",
        kMaxExchangePhases, state.tree.phases());
  }
  if (!state.options.layout_level.empty()) {
    ASSIGN_OR_RETURN(made->group_of_rank_, GroupOfRank(topology, state.options.layout_level, &made->groups_));
    return made;
  }
  made->group_of_rank_.resize(topology.ranks());
  const Group& root = topology.groups()[0];
  made->groups_ = static_cast<int>(root.children.size());
  for (int child = 0; child < made->groups_; ++child) {
    for (const int rank : topology.groups()[root.children[child]].ranks) made->group_of_rank_[rank] = child;
  }
  return made;
}

Status ExpertExchange::SetMap(std::shared_ptr<const ExpertMap> map) {
  if (map->ranks() != state_.map->ranks()) {
    return InvalidArgument("exchange: the placement has {} ranks, expected {}", map->ranks(),
                           state_.map->ranks());
  }
  if (map->physical_experts() > kMaxPhysicalExperts) {
    return InvalidArgument("exchange: at most {} expert replicas are supported, found {}",
                           kMaxPhysicalExperts, map->physical_experts());
  }
  for (const std::weak_ptr<Operation>& held : in_flight_) {
    const auto operation = held.lock();
    if (operation != nullptr && !operation->ended() && operation->uses_map()) {
      return absl::FailedPreconditionError("exchange: a dispatch is in flight; finish it before SetMap()");
    }
  }
  state_.chooser.SetMap(*map);
  state_.map = std::move(map);
  return OkStatus();
}

StatusOr<ExchangeLayout> ExpertExchange::Layout(const TopK& topk) {
  RETURN_IF_ERROR(RouteTokens(topk, *state_.map, state_.chooser, &tokens_));
  return CountLayout(tokens_, *state_.map, group_of_rank_, groups_);
}

Status ExpertExchange::CheckInput(const PayloadRows& x, int64_t tokens) const {
  RETURN_IF_ERROR(CheckRows(x, tokens, state_.hidden, "x"));
  if (CanEncode(x.payload, state_.options.dispatch_payload)) return OkStatus();
  return InvalidArgument("exchange: x cannot be sent as {}; choose another dispatch payload, found {}",
                         PayloadName(state_.options.dispatch_payload), PayloadName(x.payload));
}

Status ExpertExchange::CheckHandle(const RouteHandle& handle) const {
  if (!handle.valid()) return InvalidArgument("exchange: the handle is empty; pass that of a dispatch");
  if (handle.epoch_ == state_.epoch) return OkStatus();
  return absl::FailedPreconditionError(
      "exchange: the handle is older than the last SetDead(); dispatch again for a new one");
}

Dispatched ExpertExchange::Result(std::shared_ptr<Route> route, std::shared_ptr<RowMemory> rows) const {
  Dispatched result;
  const auto count = static_cast<int64_t>(route->origins.size());
  result.payload_ = state_.options.dispatch_payload;
  result.data_ = {rows->data.data(),
                  static_cast<size_t>(count * state_.hidden * ElementBytes(result.payload_))};
  result.scales_ = {rows->scales.as<const float>(),
                    static_cast<size_t>(count * ScalesPerRow(result.payload_, state_.hidden))};
  result.memory_ = std::move(rows);
  result.handle_.route_ = std::move(route);
  result.handle_.epoch_ = state_.epoch;
  return result;
}

void ExpertExchange::AddInFlight(const std::shared_ptr<Operation>& operation) {
  std::erase_if(in_flight_, [](const auto& held) { return held.expired(); });
  in_flight_.push_back(operation);
}

bool ExpertExchange::AdvanceAll() {
  bool progressed = false;
  state_.transport.Progress();
  for (const std::weak_ptr<Operation>& held : in_flight_) {
    if (const auto operation = held.lock()) operation->Step(&progressed);
  }
  return progressed;
}

Status ExpertExchange::Wait(Operation& operation) {
  const double begin = state_.transport.Now();
  double last_progress = begin;
  for (;;) {
    const bool progressed = AdvanceAll();
    if (operation.ended()) return operation.failure();
    const double now = state_.transport.Now();
    if (progressed) {
      last_progress = now;
      continue;
    }
    FailIfOverdue(operation, now, begin, last_progress);
    if (operation.ended()) return operation.failure();
    state_.transport.Idle();
  }
}

void ExpertExchange::FailIfOverdue(Operation& operation, double now, double begin, double last_progress) {
  const double limit = state_.options.time_limit_s;
  if (now - begin >= limit) {
    return operation.Fail(absl::DeadlineExceededError(fmt::format(
        "exchange: rank {} waited {} s in a {} for rank {}; call SetDead() on all live ranks and repeat it{}",
        state_.rank(), limit, operation.name(), operation.WaitsFor(), SilentPeers(state_.transport))));
  }
  if (now - last_progress <= kFaultGraceS) return;
  for (int peer = 0; peer < state_.map->ranks(); ++peer) {
    if (peer == state_.rank() || state_.dead[peer] || !state_.transport.failed(peer)) continue;
    return operation.Fail(absl::UnavailableError(fmt::format(
        "exchange: rank {} is dead, and the {} of rank {} cannot end; call SetDead() on all live ranks", peer,
        operation.name(), state_.rank())));
  }
}

StatusOr<Dispatched> ExpertExchange::Dispatch(const PayloadRows& x, const TopK& topk) {
  RETURN_IF_ERROR(CheckInput(x, topk.tokens));
  RETURN_IF_ERROR(RouteTokens(topk, *state_.map, state_.chooser, &tokens_));
  auto route = routes_.Take();
  auto rows = rows_.Take();
  const auto operation = std::make_shared<RowDispatch>(state_, x, &tokens_, route, rows, memory_.Take());
  AddInFlight(operation);
  RETURN_IF_ERROR(Wait(*operation));
  return Result(std::move(route), std::move(rows));
}

StatusOr<PendingDispatch> ExpertExchange::BeginThroughputDispatch(const PayloadRows& x, const TopK& topk) {
  RETURN_IF_ERROR(CheckInput(x, topk.tokens));
  RETURN_IF_ERROR(RouteTokens(topk, *state_.map, state_.chooser, &tokens_));
  PendingDispatch pending;
  pending.exchange_ = this;
  pending.route_ = routes_.Take();
  pending.rows_ = rows_.Take();
  pending.operation_ =
      std::make_shared<RowDispatch>(state_, x, &tokens_, pending.route_, pending.rows_, memory_.Take());
  AddInFlight(pending.operation_);
  AdvanceAll();
  return pending;
}

StatusOr<Dispatched> ExpertExchange::Dispatch(const PayloadRows& x, const RouteHandle& handle) {
  RETURN_IF_ERROR(CheckHandle(handle));
  RETURN_IF_ERROR(CheckInput(x, handle.tokens()));
  auto rows = rows_.Take();
  const auto operation =
      std::make_shared<RowDispatch>(state_, x, nullptr, handle.route_, rows, memory_.Take());
  AddInFlight(operation);
  RETURN_IF_ERROR(Wait(*operation));
  return Result(handle.route_, std::move(rows));
}

StatusOr<std::shared_ptr<RowCombine>> ExpertExchange::StartCombine(const PayloadRows& y,
                                                                   const RouteHandle& handle,
                                                                   const CombineOutput& out) {
  RETURN_IF_ERROR(CheckHandle(handle));
  if (y.payload != Payload::kF32 && y.payload != Payload::kBf16) {
    return InvalidArgument("exchange: y must be f32 or bf16, found {}", PayloadName(y.payload));
  }
  RETURN_IF_ERROR(CheckRows(y, handle.rows(), state_.hidden, "y"));
  if (out.payload != Payload::kF32 && out.payload != Payload::kBf16) {
    return InvalidArgument("exchange: the output must be f32 or bf16, found {}", PayloadName(out.payload));
  }
  RETURN_IF_ERROR(CheckRows({out.payload, out.data, {}}, handle.tokens(), state_.hidden, "output"));
  // Sums are stored while rows of later tokens are still read.
  if (const auto shared = SharedOffset(y.data, out.data); shared) {
    return InvalidArgument(
        "exchange: y and the output of a combine must not overlap, but share bytes from offset {} of the "
        "output; pass another output",
        *shared);
  }
  auto operation = std::make_shared<RowCombine>(state_, y, out, handle.route_, memory_.Take());
  RETURN_IF_ERROR(operation->Start());
  AddInFlight(operation);
  return operation;
}

Status ExpertExchange::Combine(const PayloadRows& y, const RouteHandle& handle, const CombineOutput& out) {
  ASSIGN_OR_RETURN(const auto operation, StartCombine(y, handle, out));
  return Wait(*operation);
}

StatusOr<PendingCombine> ExpertExchange::BeginCombine(const PayloadRows& y, const RouteHandle& handle,
                                                      const CombineOutput& out) {
  ASSIGN_OR_RETURN(auto operation, StartCombine(y, handle, out));
  PendingCombine pending;
  pending.exchange_ = this;
  pending.operation_ = std::move(operation);
  AdvanceAll();
  return pending;
}

StatusOr<PendingDispatch> ExpertExchange::BeginDispatch(const PayloadRows& x, const TopK& topk) {
  const ExchangeOptions& options = state_.options;
  if (topk.tokens > options.low_latency_tokens) {
    return InvalidArgument("exchange: low-latency buffers have {} tokens per rank, found {}",
                           options.low_latency_tokens, topk.tokens);
  }
  if (topk.k > options.low_latency_slots) {
    return InvalidArgument("exchange: low-latency buffers have {} slots per token, found top-{}",
                           options.low_latency_slots, topk.k);
  }
  RETURN_IF_ERROR(CheckInput(x, topk.tokens));
  RETURN_IF_ERROR(RouteTokens(topk, *state_.map, state_.chooser, &tokens_));
  std::shared_ptr<FixedBuffers> buffers;
  for (std::shared_ptr<FixedBuffers>& slot : fixed_) {
    if (slot == nullptr) slot = std::make_shared<FixedBuffers>();
    if (slot.use_count() == 1) buffers = slot;
  }
  if (buffers == nullptr) {
    return absl::FailedPreconditionError(
        "exchange: two low-latency dispatches are in flight; finish one first");
  }
  buffers->bytes_per_rank =
      options.low_latency_tokens *
      (RowRoutingBytes(options.low_latency_slots) + WireRowBytes(options.dispatch_payload, state_.hidden));
  RETURN_IF_ERROR(buffers->memory.Reserve(static_cast<size_t>(buffers->bytes_per_rank * state_.map->ranks()),
                                          /*huge=*/true));
  PendingDispatch pending;
  pending.exchange_ = this;
  pending.route_ = routes_.Take();
  pending.rows_ = rows_.Take();
  auto operation = std::make_shared<LowLatencyDispatch>(state_, x, tokens_, pending.route_, pending.rows_,
                                                        memory_.Take(), std::move(buffers));
  RETURN_IF_ERROR(operation->Start());
  AddInFlight(operation);
  pending.operation_ = std::move(operation);
  AdvanceAll();
  return pending;
}

template <typename Result>
bool PendingExchange<Result>::Poll() {
  if (operation_->ended()) return true;
  const bool progressed = exchange_->AdvanceAll();
  if (operation_->ended()) return true;
  const double now = exchange_->state_.transport.Now();
  if (begin_ < 0) begin_ = now;
  if (progressed || last_progress_ < 0) {
    last_progress_ = now;
    return false;
  }
  exchange_->FailIfOverdue(*operation_, now, begin_, last_progress_);
  return operation_->ended();
}

template <typename Result>
Result PendingExchange<Result>::Finish() {
  const auto operation = std::move(operation_);
  RETURN_IF_ERROR(exchange_->Wait(*operation));
  if constexpr (std::is_same_v<Result, Status>) {
    return OkStatus();
  } else {
    return exchange_->Result(std::move(route_), std::move(rows_));
  }
}

template class PendingExchange<StatusOr<Dispatched>>;
template class PendingExchange<Status>;

Status ExpertExchange::SetDead(std::span<const int> ranks) {
  std::vector<bool> dead(state_.map->ranks(), false);
  for (const int rank : ranks) {
    if (rank < 0 || rank >= state_.map->ranks()) {
      return InvalidArgument("exchange: dead ranks must be in [0, {}), found {}", state_.map->ranks(), rank);
    }
    if (rank == state_.rank())
      return InvalidArgument("exchange: a rank cannot declare itself dead, found {}", rank);
    dead[rank] = true;
  }
  for (const std::weak_ptr<Operation>& held : in_flight_) {
    const auto operation = held.lock();
    if (operation != nullptr && !operation->ended()) {
      operation->Fail(
          Cancelled("exchange: SetDead() ended a {} of rank {}", operation->name(), state_.rank()));
    }
  }
  state_.dead = std::move(dead);
  state_.chooser.SetDead(state_.dead);
  state_.direct = RouteTree::Direct(state_.dead);
  state_.tree = state_.options.forwarding == Forwarding::kHierarchical
                    ? RouteTree::Hierarchical(state_.topology, state_.dead, state_.options.forward_levels)
                    : state_.direct;
  ++state_.epoch;
  state_.sequence = 0;
  return OkStatus();
}

void ExpertExchange::ResetTraffic() {
  state_.dispatch_traffic.Reset();
  state_.combine_traffic.Reset();
}

}  // namespace moesaic::comm
