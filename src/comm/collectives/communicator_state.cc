#include "comm/collectives/communicator_state.h"

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "comm/transport/buffer_overlap.h"

namespace moesaic::comm {
namespace {

using tensor::DType;

// Tags of a call: 20 bits of its sequence number, then the stream. Plans use streams below kMaxStreams.
constexpr int kStreamBits = 4;
constexpr Tag kCountsStream = 8, kCheckStream = 9;
static_assert(kMaxStreams <= 8);
constexpr uint32_t kSequenceMask = (1U << (kCommunicatorTagBits - kStreamBits)) - 1;
// Plans and their scratch are kept for reuse: of the most recent requests.
constexpr size_t kMaxCachedPlans = 64;
// A rank whose peers are alive, but not all ranks, waits this long for an error that says more.
constexpr double kDeadGrace = 0.25;
// The time limit begins a few polls after a call, so that calls which end at once do not read the clock.
constexpr int kCallsBeforeClock = 4;
constexpr int kCallsBetweenClocks = 64;  // reading the clock takes as long as a look at the transfers

uint64_t HashOf(std::span<const int64_t> counts) {
  uint64_t hash = 14695981039346656037ULL;  // FNV-1a over words
  for (const int64_t count : counts) hash = (hash ^ static_cast<uint64_t>(count)) * 1099511628211ULL;
  return hash;
}

// Other ranks may run another version of the library.
bool IsKnown(const CallRecord& record) {
  return record.collective <= static_cast<uint16_t>(Collective::kBarrier) &&
         record.dtype <= static_cast<uint8_t>(DType::kMxfp4) &&
         record.op <= static_cast<uint8_t>(ReduceOp::kMax);
}

std::string Describe(const CallRecord& record) {
  if (!IsKnown(record))
    return fmt::format("call {} of a kind that this version does not know", record.sequence);
  return fmt::format("call {}: {} of {} elements of {}, {}, root {}", record.sequence,
                     Name(static_cast<Collective>(record.collective)), record.count,
                     tensor::DTypeName(static_cast<DType>(record.dtype)),
                     Name(static_cast<ReduceOp>(record.op)), record.root);
}

bool IsAligned(std::span<const std::byte> buffer, size_t size) {
  return reinterpret_cast<uintptr_t>(buffer.data()) % size == 0;  // NOLINT
}

// Bytes of the vector if the rank's part of the plan is one message each way and their sum; otherwise 0.
size_t ExchangeBytes(const Plan& plan, int rank) {
  if (plan.request.collective != Collective::kAllReduce || plan.request.ranks != 2) return 0;
  const std::vector<Stream>& streams = plan.ranks[rank].streams;
  if (streams.size() != 1 || streams[0].rounds.size() != 1) return 0;
  const Round& round = streams[0].rounds[0];
  if (!round.local.empty() || round.sends.size() != 1 || round.receives.size() != 1) return 0;
  const Message &send = round.sends[0], &receive = round.receives[0];
  const auto is_whole = [&](const Message& message, PlanBuffer buffer) {
    return message.slice.buffer == buffer && message.slice.offset == 0 &&
           message.slice.count == plan.request.count && message.wire == WireFormat::kExact;
  };
  if (!is_whole(send, PlanBuffer::kInput) || !is_whole(receive, PlanBuffer::kOutput)) return 0;
  if (!receive.reduce || receive.addend != 0) return 0;
  const int64_t count = plan.request.count, element_bytes = plan.request.element_bytes;
  return count <= PieceElements(count, element_bytes) ? static_cast<size_t>(count * element_bytes) : 0;
}

}  // namespace

StatusOr<std::shared_ptr<CachedPlan>> Communicator::State::FindPlan(const PlanRequest& request, DType dtype,
                                                                    ReduceOp op) {
  const std::vector<int64_t>& counts = request.matrix.empty() ? request.counts : request.matrix;
  for (auto it = cache.begin(); it != cache.end(); ++it) {
    const CacheKey& key = (*it)->key;
    if (key.collective != request.collective || key.count != request.count || key.dtype != dtype ||
        key.op != op || key.root != request.root || key.counts != counts) {
      continue;
    }
    if (it != cache.begin()) {
      cache.splice(cache.begin(), cache, it);
      if (has_large) TrimIdle();
    }
    return cache.front();
  }
  auto added = std::make_shared<CachedPlan>();
  added->key = {request.collective, dtype, op, request.root, request.count, counts};
  PlanMode of_call = mode();
  if (dtype != DType::kF32 || op != ReduceOp::kSum) of_call.wire = WireFormat::kExact;
  const bool reduces =
      request.collective == Collective::kAllReduce || request.collective == Collective::kReduceScatter;
  if (reduces) {
    ASSIGN_OR_RETURN(added->kernel, FindReduceKernel(dtype, op));
  }
  ASSIGN_OR_RETURN(Plan plan, planner.PlanCollective(request, of_call));
  added->exchange_bytes = ExchangeBytes(plan, rank);
  added->plan = std::make_shared<const Plan>(std::move(plan));
  cache.push_front(added);
  if (cache.size() > kMaxCachedPlans) cache.pop_back();
  if (has_large) TrimIdle();
  return added;
}

void Communicator::State::TrimIdle() {
  int64_t bytes = 0;
  for (const std::shared_ptr<CachedPlan>& plan : cache) {
    if (plan == cache.front()) continue;
    for (const std::unique_ptr<PlanExecutor>& executor : plan->idle) bytes += executor->memory_bytes();
    if (bytes > options.idle_bytes) plan->idle.clear();
  }
}

Tag Communicator::State::TagOfCall() const {
  return options.first_tag + ((sequence & kSequenceMask) << kStreamBits);
}

std::optional<Status> Communicator::State::TryExchange(std::span<const std::byte> input,
                                                       std::span<std::byte> output, DType dtype,
                                                       ReduceOp op) {
  if (cache.empty() || !calls.empty() || options.check_calls) return std::nullopt;
  const CachedPlan& cached = *cache.front();
  if (cached.exchange_bytes == 0 || cached.exchange_bytes != output.size() || input.size() != output.size() ||
      cached.key.dtype != dtype || cached.key.op != op) {
    return std::nullopt;
  }
  const auto element_bytes = static_cast<size_t>(cached.plan->request.element_bytes);
  if (!IsAligned(input, element_bytes) || !IsAligned(output, element_bytes)) return std::nullopt;
  const bool in_place = input.data() == output.data();
  if (!in_place && SharedOffset(input, output)) return std::nullopt;
  if (in_place) exchange_term.resize(input.size());
  const std::span<std::byte> received = in_place ? std::span(exchange_term) : output;
  ++sequence;
  const int peer = 1 - rank;
  Status result = transport.Exchange(peer, TagOfCall(), input, received, options.time_limit_s);
  if (result.ok()) {
    cached.kernel(output.data(), in_place ? received.data() : input.data(), cached.key.count);
    return result;
  }
  if (result.code() == StatusCode::kDeadlineExceeded) {
    return TimeLimitError(Collective::kAllReduce, sequence, fmt::format("rank {}", peer));
  }
  return Annotate(result, fmt::format("{} ({})", Name(Collective::kAllReduce), cached.plan->algorithm));
}

Status Communicator::State::TimeLimitError(Collective collective, uint32_t number,
                                           const std::string& waiting) const {
  const std::string_view name = Name(collective);
  const std::string silent = SilentPeers(transport);
  return FormatStatus(StatusCode::kDeadlineExceeded,
                      "{}: rank {}: call {} took longer than {} s; check that all ranks make the call; still "
                      "waiting for: {}{}",
                      fmt::make_format_args(name, rank, number, options.time_limit_s, waiting, silent));
}

PendingCall& Communicator::State::NewCall(PlanRequest request, std::span<const std::byte> input,
                                          std::span<std::byte> output, DType dtype, ReduceOp op) {
  if (idle_calls.empty()) idle_calls.push_back(std::make_unique<PendingCall>());
  calls.push_back(std::move(idle_calls.back()));
  idle_calls.pop_back();
  PendingCall& call = *calls.back();
  call.phase = PendingCall::Phase::kPlan;
  call.handle = nullptr;
  call.request = std::move(request);
  call.dtype = dtype;
  call.op = op;
  call.input = input;
  call.output = output;
  call.number = sequence;
  call.tag = TagOfCall();
  call.dead_since = -1;
  call.polls = 0;
  call.result = OkStatus();
  call.transfers.clear();
  return call;
}

StatusOr<PendingCall*> Communicator::State::Begin(PlanRequest request, std::span<const std::byte> input,
                                                  std::span<std::byte> output, DType dtype, ReduceOp op,
                                                  std::span<const int64_t> counts,
                                                  std::span<int64_t> received) {
  ++sequence;  // also of calls that are refused, so that ranks stay in step
  const bool exchanges_counts = request.collective == Collective::kAllToAllv;
  const std::string_view name = Name(request.collective);
  if (request.element_bytes <= 0 || tensor::BlockOf(dtype).elements != 1) {
    return InvalidArgument("{}: elements must be scalars; found {}", name, tensor::DTypeName(dtype));
  }
  if (exchanges_counts) {
    int64_t sum = 0;
    for (const int64_t count : counts) {
      if (count < 0) return InvalidArgument("{}: rank {}: a count is negative: {}", name, rank, count);
      const int64_t most = std::numeric_limits<int64_t>::max() / request.element_bytes;
      if (count > most - sum) {
        return InvalidArgument("{}: rank {}: counts must be at most {} in all; the sum exceeds it at {}",
                               name, rank, most, count);
      }
      sum += count;
    }
    if (static_cast<size_t>(sum * request.element_bytes) != input.size()) {
      return InvalidArgument("{}: rank {}: the input must have {} bytes; found {}", name, rank,
                             sum * request.element_bytes, input.size());
    }
  } else {
    RETURN_IF_ERROR(ValidateRequest(request));
    const auto expected_input = static_cast<size_t>(InputCount(request, rank) * request.element_bytes);
    const auto expected_output = static_cast<size_t>(OutputCount(request, rank) * request.element_bytes);
    const bool reads = request.collective != Collective::kBroadcast || rank == request.root;
    if (reads && input.size() != expected_input) {
      return InvalidArgument("{}: rank {}: the input must have {} bytes; found {}", name, rank,
                             expected_input, input.size());
    }
    if (!reads) input = {};
    if (output.size() != expected_output) {
      return InvalidArgument("{}: rank {}: the output must have {} bytes; found {}", name, rank,
                             expected_output, output.size());
    }
  }
  const bool in_place = request.collective == Collective::kAllReduce && input.data() == output.data();
  if (const auto shared = SharedOffset(input, output); shared && !in_place) {
    return InvalidArgument("{}: rank {}: input and output must not overlap; they share bytes from offset {}",
                           name, rank, *shared);
  }
  const auto size = static_cast<size_t>(request.element_bytes);
  if (!IsAligned(input, size) || !IsAligned(output, size)) {
    return InvalidArgument("{}: rank {}: buffers must be aligned to elements of {} bytes", name, rank, size);
  }
  PendingCall& call = NewCall(std::move(request), input, output, dtype, op);
  if (in_place && ranks > 1) {
    call.copy.assign(input.begin(), input.end());
    call.input = call.copy;
  }
  if (exchanges_counts) {
    call.counts.assign(counts.begin(), counts.end());
    call.counts.push_back(static_cast<int64_t>(output.size()) / call.request.element_bytes);
    call.received = received;
  }
  Status status;
  if (options.check_calls && ranks > 1) {
    call.phase = PendingCall::Phase::kCheck;
    call.record = {.sequence = sequence,
                   .collective = static_cast<uint16_t>(call.request.collective),
                   .dtype = static_cast<uint8_t>(dtype),
                   .op = static_cast<uint8_t>(op),
                   .root = call.request.root,
                   .count = call.request.count,
                   .counts_hash = HashOf(call.request.counts)};
    status = StartExchange(call, kCheckStream, std::span<const CallRecord>(&call.record, 1), &call.records);
  } else if (exchanges_counts) {
    call.phase = PendingCall::Phase::kCounts;
    status = StartExchange(call, kCountsStream, std::span<const int64_t>(call.counts), &call.all_counts);
  } else {
    status = StartPlan(call);
  }
  if (!status.ok()) End(call, status);
  return &call;
}

template <typename T>
Status Communicator::State::StartExchange(PendingCall& call, Tag stream, std::span<const T> own,
                                          std::vector<T>* all) {
  all->assign(own.size() * ranks, T{});
  std::copy(own.begin(), own.end(), all->begin() + static_cast<int64_t>(own.size()) * rank);
  call.transfers.clear();
  call.transfers.reserve(2 * static_cast<size_t>(ranks));
  for (int distance = 1; distance < ranks; ++distance) {
    const int from = (rank + ranks - distance) % ranks, to = (rank + distance) % ranks;
    const std::span<T> place(all->data() + own.size() * from, own.size());
    ASSIGN_OR_RETURN(const TransferId receive,
                     transport.Receive(from, call.tag + stream, std::as_writable_bytes(place)));
    call.transfers.push_back({receive, from, true});
    ASSIGN_OR_RETURN(const TransferId send, transport.Send(to, call.tag + stream, std::as_bytes(own)));
    call.transfers.push_back({send, to, true});
  }
  return OkStatus();
}

StatusOr<bool> Communicator::State::AdvanceExchange(PendingCall& call) {
  bool ended = true;
  for (PendingCall::Transfer& transfer : call.transfers) {
    if (!transfer.busy) continue;
    Status status;
    if (!transport.Test(transfer.id, &status)) {
      ended = false;
      continue;
    }
    transfer.busy = false;
    RETURN_IF_ERROR(status);
  }
  return ended;
}

Status Communicator::State::OnRecords(PendingCall& call) {
  const CallRecord& own = call.record;
  for (int other = 0; other < ranks; ++other) {
    const CallRecord& record = call.records[other];
    const bool equal = record.sequence == own.sequence && record.collective == own.collective &&
                       record.dtype == own.dtype && record.op == own.op && record.root == own.root &&
                       record.count == own.count && record.counts_hash == own.counts_hash;
    if (equal) continue;
    return InvalidArgument("rank {} made {}; rank {} made {}{}", rank, Describe(own), other, Describe(record),
                           record.counts_hash != own.counts_hash ? ", with other counts" : "");
  }
  if (call.request.collective != Collective::kAllToAllv) return StartPlan(call);
  call.phase = PendingCall::Phase::kCounts;
  return StartExchange(call, kCountsStream, std::span<const int64_t>(call.counts), &call.all_counts);
}

Status Communicator::State::OnCounts(PendingCall& call) {
  const auto width = static_cast<size_t>(ranks) + 1;
  call.request.matrix.resize(static_cast<size_t>(ranks) * ranks);
  for (int from = 0; from < ranks; ++from) {
    std::copy_n(call.all_counts.begin() + static_cast<int64_t>(width) * from, ranks,
                call.request.matrix.begin() + static_cast<int64_t>(ranks) * from);
  }
  RETURN_IF_ERROR(ValidateRequest(call.request));
  for (int to = 0; to < ranks; ++to) {
    const int64_t space = call.all_counts[width * to + ranks], needed = OutputCount(call.request, to);
    if (needed > space) {
      return InvalidArgument("all_to_allv: rank {} receives {} elements; its output has {}", to, needed,
                             space);
    }
  }
  for (int from = 0; from < ranks; ++from) {
    call.received[from] = call.request.matrix[static_cast<size_t>(ranks) * from + rank];
  }
  return StartPlan(call);
}

Status Communicator::State::StartPlan(PendingCall& call) {
  call.phase = PendingCall::Phase::kPlan;
  ASSIGN_OR_RETURN(call.cached, FindPlan(call.request, call.dtype, call.op));
  if (call.cached->idle.empty()) {
    ASSIGN_OR_RETURN(call.executor,
                     PlanExecutor::Create(call.cached->plan, transport, call.dtype, call.cached->kernel));
  } else {
    call.executor = std::move(call.cached->idle.back());
    call.cached->idle.pop_back();
  }
  call.executor->Start(call.input.data(), call.output.data(), call.tag);
  return OkStatus();
}

StatusOr<bool> Communicator::State::Step(PendingCall& call) {
  for (;;) {
    const PendingCall::Phase phase = call.phase;
    if (phase == PendingCall::Phase::kPlan) {
      if (!call.executor->Advance()) return false;
      const Status& result = call.executor->result();
      if (result.ok()) return true;
      return Annotate(result,
                      fmt::format("{} ({})", Name(call.request.collective), call.executor->plan().algorithm));
    }
    ASSIGN_OR_RETURN(const bool ended, AdvanceExchange(call));
    if (!ended) return false;
    RETURN_IF_ERROR(phase == PendingCall::Phase::kCheck ? OnRecords(call) : OnCounts(call));
  }
}

bool Communicator::State::Advance(PendingCall& call) {
  if (call.phase == PendingCall::Phase::kEnded) return true;
  StatusOr<bool> ended = Step(call);
  if (ended.ok() && !*ended) {
    if (++call.polls % kCallsBetweenClocks != 0 && call.polls != kCallsBeforeClock) return false;
    const double now = transport.Now();
    if (call.polls == kCallsBeforeClock) call.deadline = now + options.time_limit_s;
    for (int other = 0; other < ranks; ++other) {
      if (!transport.failed(other)) continue;
      if (call.dead_since < 0) call.dead_since = now;
      if (now - call.dead_since < kDeadGrace) break;
      const std::string_view name = Name(call.request.collective);
      End(call, FormatStatus(StatusCode::kUnavailable,
                             "{}: rank {}: call {} cannot complete; a rank is dead: rank {}",
                             fmt::make_format_args(name, rank, call.number, other)));
      return true;
    }
    if (now < call.deadline) return false;
    std::string waiting;
    if (call.executor != nullptr) waiting = call.executor->Waiting();
    for (const PendingCall::Transfer& transfer : call.transfers) {
      if (transfer.busy) waiting += fmt::format("{}rank {}", waiting.empty() ? "" : ", ", transfer.peer);
    }
    ended = TimeLimitError(call.request.collective, call.number, waiting);
  }
  End(call, ended.status());
  return true;
}

void Communicator::State::End(PendingCall& call, Status result) {
  for (PendingCall::Transfer& transfer : call.transfers) {
    if (transfer.busy) transport.Cancel(transfer.id);
    transfer.busy = false;
  }
  if (call.executor != nullptr) {
    call.executor->Cancel(result);
    has_large |= call.executor->memory_bytes() > options.idle_bytes / static_cast<int64_t>(kMaxCachedPlans);
    if (call.cached != nullptr) call.cached->idle.push_back(std::move(call.executor));
    call.executor.reset();
    if (has_large) TrimIdle();
  }
  call.cached.reset();
  call.phase = PendingCall::Phase::kEnded;
  call.result = std::move(result);
}

void Communicator::State::AdvanceAll() {
  transport.Progress();
  for (const std::unique_ptr<PendingCall>& call : calls) Advance(*call);
}

void Communicator::State::Release(PendingCall* call) {
  const auto found =
      std::find_if(calls.begin(), calls.end(), [&](const auto& other) { return other.get() == call; });
  MOESAIC_CHECK(found != calls.end());
  idle_calls.push_back(std::move(*found));
  calls.erase(found);
  // The next call takes the last one. Copies of the others are bounded as the scratch of plans is.
  int64_t bytes = 0;
  for (size_t i = 0; i + 1 < idle_calls.size(); ++i) {
    bytes += static_cast<int64_t>(idle_calls[i]->copy.capacity());
    if (bytes > options.idle_bytes) std::vector<std::byte>().swap(idle_calls[i]->copy);
  }
}

Status Communicator::State::Wait(PendingCall* call) {
  for (;;) {
    AdvanceAll();
    if (call->phase == PendingCall::Phase::kEnded) break;
    transport.Idle();
  }
  Status result = call->result;
  Release(call);
  return result;
}

}  // namespace moesaic::comm
