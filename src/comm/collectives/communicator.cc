#include "comm/collectives/communicator.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/check.h"
#include "comm/collectives/communicator_state.h"

namespace moesaic::comm {

using tensor::DType;

bool ChecksCallsByDefault() {
#ifdef NDEBUG
  return false;
#else
  return true;
#endif
}

Communicator::Communicator(std::unique_ptr<State> state) : state_(std::move(state)) {}

Communicator::~Communicator() {
  for (const std::unique_ptr<PendingCall>& call : state_->calls) {
    if (call->phase != PendingCall::Phase::kEnded)
      state_->End(*call, Cancelled("the communicator was destroyed"));
    CollectiveHandle* const handle = call->handle;
    if (handle == nullptr) continue;
    handle->owner_ = nullptr;
    handle->call_ = nullptr;
  }
}

StatusOr<std::unique_ptr<Communicator>> Communicator::Create(Transport& transport, Topology topology,
                                                             CommunicatorOptions options) {
  if (topology.ranks() != transport.size()) {
    return InvalidArgument("topology {} has {} ranks; the job has {}", topology.name(), topology.ranks(),
                           transport.size());
  }
  if (transport.size() > kMaxCommunicatorRanks) {
    return InvalidArgument("a communicator has at most {} ranks; found {}", kMaxCommunicatorRanks,
                           transport.size());
  }
  if (options.deterministic && options.compression != WireFormat::kExact) {
    return InvalidArgument("deterministic reductions are exact; compression is set to {}",
                           Name(options.compression));
  }
  if (!(options.time_limit_s > 0)) {
    return InvalidArgument("the time limit must be positive; found {} s", options.time_limit_s);
  }
  if (options.first_tag % (Tag{1} << kCommunicatorTagBits) != 0 ||
      options.first_tag > kTagLimit - (Tag{1} << kCommunicatorTagBits)) {
    return InvalidArgument("first_tag must be a multiple of 2^{} below 2^30; found {}", kCommunicatorTagBits,
                           options.first_tag);
  }
  auto state = std::make_unique<State>(transport, std::move(topology), std::move(options));
  state->rank = transport.rank();
  state->ranks = transport.size();
  return std::unique_ptr<Communicator>(new Communicator(std::move(state)));
}

int Communicator::rank() const { return state_->rank; }
int Communicator::size() const { return state_->ranks; }
const Topology& Communicator::topology() const { return state_->planner.topology(); }
Transport& Communicator::transport() const { return state_->transport; }
void Communicator::Progress() { state_->AdvanceAll(); }

StatusOr<CollectiveHandle> Communicator::StartAllReduce(std::span<const std::byte> input,
                                                        std::span<std::byte> output, DType dtype,
                                                        ReduceOp op) {
  const int64_t bytes = tensor::BytesOf(dtype, tensor::BlockOf(dtype).elements);
  PlanRequest request{.collective = Collective::kAllReduce,
                      .ranks = state_->ranks,
                      .count = static_cast<int64_t>(output.size()) / bytes,
                      .element_bytes = static_cast<int>(bytes)};
  ASSIGN_OR_RETURN(PendingCall* const call, state_->Begin(std::move(request), input, output, dtype, op));
  return CollectiveHandle(this, call);
}

StatusOr<CollectiveHandle> Communicator::StartReduceScatter(std::span<const std::byte> input,
                                                            std::span<std::byte> output,
                                                            std::span<const int64_t> counts, DType dtype,
                                                            ReduceOp op) {
  PlanRequest request{.collective = Collective::kReduceScatter,
                      .ranks = state_->ranks,
                      .counts = {counts.begin(), counts.end()},
                      .element_bytes = tensor::BlockOf(dtype).bytes};
  ASSIGN_OR_RETURN(PendingCall* const call, state_->Begin(std::move(request), input, output, dtype, op));
  return CollectiveHandle(this, call);
}

StatusOr<CollectiveHandle> Communicator::StartAllGather(std::span<const std::byte> input,
                                                        std::span<std::byte> output,
                                                        std::span<const int64_t> counts, DType dtype) {
  PlanRequest request{.collective = Collective::kAllGather,
                      .ranks = state_->ranks,
                      .counts = {counts.begin(), counts.end()},
                      .element_bytes = tensor::BlockOf(dtype).bytes};
  ASSIGN_OR_RETURN(PendingCall* const call,
                   state_->Begin(std::move(request), input, output, dtype, ReduceOp::kSum));
  return CollectiveHandle(this, call);
}

StatusOr<CollectiveHandle> Communicator::StartAllToAll(std::span<const std::byte> input,
                                                       std::span<std::byte> output, DType dtype) {
  const int bytes = tensor::BlockOf(dtype).bytes;
  PlanRequest request{.collective = Collective::kAllToAll,
                      .ranks = state_->ranks,
                      .count = static_cast<int64_t>(output.size()) / bytes / state_->ranks,
                      .element_bytes = bytes};
  ASSIGN_OR_RETURN(PendingCall* const call,
                   state_->Begin(std::move(request), input, output, dtype, ReduceOp::kSum));
  return CollectiveHandle(this, call);
}

StatusOr<CollectiveHandle> Communicator::StartAllToAllv(std::span<const std::byte> input,
                                                        std::span<const int64_t> counts,
                                                        std::span<std::byte> output,
                                                        std::span<int64_t> received, DType dtype) {
  const auto ranks = static_cast<size_t>(state_->ranks);
  if (counts.size() != ranks || received.size() != ranks) {
    ++state_->sequence;
    return InvalidArgument("all_to_allv: rank {}: expected {} counts and received counts; found {} and {}",
                           rank(), ranks, counts.size(), received.size());
  }
  const int bytes = tensor::BlockOf(dtype).bytes;
  PlanRequest request{.collective = Collective::kAllToAllv, .ranks = state_->ranks, .element_bytes = bytes};
  ASSIGN_OR_RETURN(PendingCall* const call,
                   state_->Begin(std::move(request), input, output, dtype, ReduceOp::kSum, counts, received));
  return CollectiveHandle(this, call);
}

StatusOr<CollectiveHandle> Communicator::StartBroadcast(std::span<const std::byte> input,
                                                        std::span<std::byte> output, int root, DType dtype) {
  const int bytes = tensor::BlockOf(dtype).bytes;
  PlanRequest request{.collective = Collective::kBroadcast,
                      .ranks = state_->ranks,
                      .root = root,
                      .count = static_cast<int64_t>(output.size()) / bytes,
                      .element_bytes = bytes};
  ASSIGN_OR_RETURN(PendingCall* const call,
                   state_->Begin(std::move(request), input, output, dtype, ReduceOp::kSum));
  return CollectiveHandle(this, call);
}

StatusOr<CollectiveHandle> Communicator::StartBarrier() {
  PlanRequest request{.collective = Collective::kBarrier, .ranks = state_->ranks, .element_bytes = 1};
  ASSIGN_OR_RETURN(PendingCall* const call,
                   state_->Begin(std::move(request), {}, {}, DType::kU8, ReduceOp::kSum));
  return CollectiveHandle(this, call);
}

Status Communicator::AllReduce(std::span<const std::byte> input, std::span<std::byte> output, DType dtype,
                               ReduceOp op) {
  if (std::optional<Status> done = state_->TryExchange(input, output, dtype, op)) return *std::move(done);
  ASSIGN_OR_RETURN(CollectiveHandle handle, StartAllReduce(input, output, dtype, op));
  return handle.Wait();
}

Status Communicator::ReduceScatter(std::span<const std::byte> input, std::span<std::byte> output,
                                   std::span<const int64_t> counts, DType dtype, ReduceOp op) {
  ASSIGN_OR_RETURN(CollectiveHandle handle, StartReduceScatter(input, output, counts, dtype, op));
  return handle.Wait();
}

Status Communicator::AllGather(std::span<const std::byte> input, std::span<std::byte> output,
                               std::span<const int64_t> counts, DType dtype) {
  ASSIGN_OR_RETURN(CollectiveHandle handle, StartAllGather(input, output, counts, dtype));
  return handle.Wait();
}

Status Communicator::AllToAll(std::span<const std::byte> input, std::span<std::byte> output, DType dtype) {
  ASSIGN_OR_RETURN(CollectiveHandle handle, StartAllToAll(input, output, dtype));
  return handle.Wait();
}

Status Communicator::AllToAllv(std::span<const std::byte> input, std::span<const int64_t> counts,
                               std::span<std::byte> output, std::span<int64_t> received, DType dtype) {
  ASSIGN_OR_RETURN(CollectiveHandle handle, StartAllToAllv(input, counts, output, received, dtype));
  return handle.Wait();
}

Status Communicator::Broadcast(std::span<const std::byte> input, std::span<std::byte> output, int root,
                               DType dtype) {
  ASSIGN_OR_RETURN(CollectiveHandle handle, StartBroadcast(input, output, root, dtype));
  return handle.Wait();
}

Status Communicator::Barrier() {
  ASSIGN_OR_RETURN(CollectiveHandle handle, StartBarrier());
  return handle.Wait();
}

Status Communicator::Run(std::shared_ptr<const Plan> plan, std::span<const std::byte> input,
                         std::span<std::byte> output, DType dtype, ReduceOp op) {
  ReduceKernel kernel = nullptr;
  if (StatusOr<ReduceKernel> found = FindReduceKernel(dtype, op); found.ok()) kernel = *found;
  ASSIGN_OR_RETURN(std::unique_ptr<PlanExecutor> executor,
                   PlanExecutor::Create(std::move(plan), state_->transport, dtype, kernel));
  ++state_->sequence;
  PendingCall& call = state_->NewCall(executor->plan().request, input, output, dtype, op);
  call.executor = std::move(executor);
  call.executor->Start(input.data(), output.data(), call.tag);
  return state_->Wait(&call);
}

CollectiveHandle::CollectiveHandle(Communicator* owner, PendingCall* call) : owner_(owner), call_(call) {
  call_->handle = this;
}

void CollectiveHandle::TakeFrom(CollectiveHandle& other) {
  owner_ = std::exchange(other.owner_, nullptr);
  call_ = std::exchange(other.call_, nullptr);
  if (call_ != nullptr) call_->handle = this;
}

CollectiveHandle::CollectiveHandle(CollectiveHandle&& other) noexcept { TakeFrom(other); }

CollectiveHandle& CollectiveHandle::operator=(CollectiveHandle&& other) noexcept {
  if (this == &other) return *this;
  Cancel();
  TakeFrom(other);
  return *this;
}

CollectiveHandle::~CollectiveHandle() { Cancel(); }

bool CollectiveHandle::Test(Status* result) {
  MOESAIC_CHECK(valid());
  owner_->state_->AdvanceAll();
  if (call_->phase != PendingCall::Phase::kEnded) return false;
  *result = call_->result;
  owner_->state_->Release(std::exchange(call_, nullptr));
  return true;
}

Status CollectiveHandle::Wait() {
  MOESAIC_CHECK(valid());
  return owner_->state_->Wait(std::exchange(call_, nullptr));
}

void CollectiveHandle::Cancel() {
  if (!valid()) return;
  if (call_->phase != PendingCall::Phase::kEnded) {
    owner_->state_->End(*call_, Cancelled("the call was cancelled"));
  }
  owner_->state_->Release(std::exchange(call_, nullptr));
}

}  // namespace moesaic::comm
