#include "comm/collectives/plan_executor.h"

#include <algorithm>
#include <cstring>
#include <span>

#include "base/check.h"
#include "comm/collectives/wire_codec.h"

namespace moesaic::comm {
namespace {

// A piece is long enough that its latency does not count, and short enough that the reduction of the last one
// does not either: an eighth of the message between these limits.
// The smaller limit is below 64 KB with a header, up to which MPI over TCP sends without a handshake. The
// answer of a handshake would wait for the data that flows in its direction.
constexpr int64_t kMinPieceBytes = 60 << 10;
constexpr int64_t kMaxPieceBytes = 1 << 20;

std::span<float> Floats(std::byte* data, int64_t count) {
  return {reinterpret_cast<float*>(data), static_cast<size_t>(count)};  // NOLINT
}

// Whether messages of the other encoding, or operands of a sum, are kept apart from the slice.
bool Stages(const Message& message, bool is_send) {
  return message.wire != WireFormat::kExact || (!is_send && message.reduce && message.addend < 0);
}

}  // namespace

// A function of the message alone, since both sides divide it.
int64_t PieceElements(int64_t count, int64_t element_bytes) {
  const int64_t bytes = std::clamp(count * element_bytes / 8, kMinPieceBytes, kMaxPieceBytes);
  return bytes / element_bytes / kWireGroup * kWireGroup;
}

StatusOr<std::unique_ptr<PlanExecutor>> PlanExecutor::Create(std::shared_ptr<const Plan> plan,
                                                             Transport& transport, tensor::DType dtype,
                                                             ReduceKernel kernel) {
  if (plan->request.ranks != transport.size()) {
    return InvalidArgument("plan {}: it has {} ranks, but the job has {}", plan->algorithm,
                           plan->request.ranks, transport.size());
  }
  const RankPlan& own = plan->ranks[transport.rank()];
  if (static_cast<int>(own.streams.size()) > kMaxStreams) {
    return Unimplemented("plan {}: at most {} streams are supported; found {}", plan->algorithm, kMaxStreams,
                         own.streams.size());
  }
  for (const Stream& stream : own.streams) {
    for (const Round& round : stream.rounds) {
      const auto reduces = [](const auto& step) { return step.reduce; };
      const auto is_lossy = [](const auto& step) { return step.wire != WireFormat::kExact; };
      if (kernel == nullptr && (std::any_of(round.local.begin(), round.local.end(), reduces) ||
                                std::any_of(round.receives.begin(), round.receives.end(), reduces))) {
        return InvalidArgument("plan {}: it reduces, but no kernel was given", plan->algorithm);
      }
      const bool lossy = std::any_of(round.local.begin(), round.local.end(), is_lossy) ||
                         std::any_of(round.sends.begin(), round.sends.end(), is_lossy) ||
                         std::any_of(round.receives.begin(), round.receives.end(), is_lossy);
      if (lossy && dtype != tensor::DType::kF32) {
        return Unimplemented("plan {}: lossy encodings take F32; found {}", plan->algorithm,
                             tensor::DTypeName(dtype));
      }
    }
  }
  return std::unique_ptr<PlanExecutor>(new PlanExecutor(std::move(plan), transport, dtype, kernel));
}

PlanExecutor::PlanExecutor(std::shared_ptr<const Plan> plan, Transport& transport, tensor::DType dtype,
                           ReduceKernel kernel)
    : plan_(std::move(plan)),
      transport_(transport),
      dtype_(dtype),
      element_bytes_(tensor::BytesOf(dtype, 1)),
      kernel_(kernel),
      own_(plan_->ranks[transport.rank()]),
      scratch_(own_.scratch * element_bytes_),
      streams_(own_.streams.size()) {
  for (size_t s = 0; s < streams_.size(); ++s) {
    size_t most = 0;
    for (const Round& round : own_.streams[s].rounds) {
      most = std::max(most, round.sends.size() + round.receives.size());
      for (const auto* messages : {&round.sends, &round.receives}) {
        for (const Message& message : *messages) {
          if (!Stages(message, messages == &round.sends)) continue;
          const int64_t count =
              std::min(message.slice.count, PieceElements(message.slice.count, element_bytes_));
          staging_bytes_ = std::max(staging_bytes_, count * element_bytes_ + 4 * (count / kWireGroup + 1));
        }
      }
    }
    streams_[s].transfers.resize(most);
  }
}

PlanExecutor::~PlanExecutor() {
  if (running_) CancelTransfers();
}

std::byte* PlanExecutor::At(const Slice& slice) {
  const int64_t offset = slice.offset * element_bytes_;
  switch (slice.buffer) {
    case PlanBuffer::kInput:
      return const_cast<std::byte*>(input_) + offset;  // NOLINT: checked plans do not write to it
    case PlanBuffer::kOutput:
      return output_ + offset;
    case PlanBuffer::kScratch:
      return scratch_.data() + offset;
  }
  return nullptr;
}

std::byte* PlanExecutor::TakeStaging() {
  if (free_staging_.empty()) {
    staging_.push_back(std::make_unique<std::byte[]>(staging_bytes_));
    free_staging_.reserve(staging_.size());
    return staging_.back().get();
  }
  std::byte* const taken = free_staging_.back();
  free_staging_.pop_back();
  return taken;
}

void PlanExecutor::Start(const std::byte* input, std::byte* output, Tag tag) {
  MOESAIC_CHECK(!running_);
  input_ = input;
  output_ = output;
  tag_ = tag;
  result_ = OkStatus();
  running_ = true;
  streams_left_ = 0;
  for (size_t s = 0; s < streams_.size(); ++s) {
    streams_[s].round = 0;
    streams_[s].started = false;
    streams_[s].count = streams_[s].left = 0;
    if (!own_.streams[s].rounds.empty()) ++streams_left_;
  }
}

void PlanExecutor::RunLocal(const LocalStep& step) {
  std::byte* const from = At(step.from);
  std::byte* const to = At(step.to);
  const int64_t count = step.from.count;
  if (step.wire != WireFormat::kExact) {
    if (from != to) std::memcpy(to, from, count * element_bytes_);
    RoundToWire(step.wire, Floats(to, count));
  } else if (step.reduce) {
    kernel_(to, from, count);
  } else if (from != to) {
    std::memcpy(to, from, count * element_bytes_);
  }
}

void PlanExecutor::StartRound(int stream) {
  StreamState& state = streams_[stream];
  const Round& round = own_.streams[stream].rounds[state.round];
  for (const LocalStep& step : round.local) RunLocal(step);
  state.count = 0;
  // Receives of large messages first: a sender that finds its receiver posted can copy at once. Small ones
  // are better on their way while receives are posted.
  const auto is_eager = [&](const Message& send) {
    return send.slice.count * element_bytes_ <= static_cast<int64_t>(transport_.EagerBytes());
  };
  const bool sends_first = std::ranges::all_of(round.sends, is_eager);
  for (const bool is_send : {sends_first, !sends_first}) {
    const size_t first = state.count;
    for (const Message& message : is_send ? round.sends : round.receives) {
      Transfer& transfer = state.transfers[state.count];
      transfer.message = &message;
      transfer.is_send = is_send;
      transfer.before = -1;
      for (size_t i = state.count; i-- > first;) {
        if (state.transfers[i].message->peer != message.peer) continue;
        transfer.before = static_cast<int>(i);
        break;
      }
      transfer.posted = transfer.ended = 0;
      transfer.is_posted = transfer.is_done = false;
      transfer.piece = PieceElements(message.slice.count, element_bytes_);
      ++state.count;
    }
  }
  state.left = state.count;
  state.started = true;
}

bool PlanExecutor::Post(Transfer& transfer, Tag tag, Piece& piece) {
  const Message& message = *transfer.message;
  piece.offset = transfer.posted;
  piece.count = std::min(transfer.piece, message.slice.count - transfer.posted);
  piece.staging = nullptr;
  std::byte* data = message.slice.count == 0
                        ? nullptr
                        : At({message.slice.buffer, message.slice.offset + piece.offset, piece.count});
  int64_t bytes = piece.count * element_bytes_;
  if (Stages(message, transfer.is_send) && piece.count > 0) {
    piece.staging = TakeStaging();
    if (message.wire != WireFormat::kExact) {
      bytes = EncodedBytes(message.wire, piece.count);
      if (transfer.is_send) Encode(message.wire, Floats(data, piece.count), piece.staging);
    }
    data = piece.staging;
  }
  const std::span<std::byte> span(data, static_cast<size_t>(bytes));
  const StatusOr<TransferId> id = transfer.is_send ? transport_.Send(message.peer, tag, span)
                                                   : transport_.Receive(message.peer, tag, span);
  if (!id.ok()) {
    if (piece.staging != nullptr) free_staging_.push_back(piece.staging);
    result_ = id.status();
    return false;
  }
  piece.id = *id;
  piece.busy = true;
  transfer.posted += piece.count;
  transfer.is_posted = transfer.posted == message.slice.count;
  return true;
}

void PlanExecutor::Finish(const Transfer& transfer, const Piece& piece) {
  const Message& message = *transfer.message;
  if (!transfer.is_send && piece.count > 0) {
    std::byte* const to = At({message.slice.buffer, message.slice.offset + piece.offset, piece.count});
    const bool has_addend = message.addend >= 0;
    if (message.wire != WireFormat::kExact && (has_addend || !message.reduce)) {
      Decode(message.wire, piece.staging, Floats(to, piece.count));
    } else if (message.wire != WireFormat::kExact) {
      DecodeAndReduce(message.wire, piece, to);
    } else if (message.reduce && !has_addend) {
      kernel_(to, piece.staging, piece.count);
    }
    if (has_addend) {
      kernel_(to, input_ + (message.addend + piece.offset) * element_bytes_, piece.count);
    }
  }
  if (piece.staging != nullptr) free_staging_.push_back(piece.staging);
}

void PlanExecutor::DecodeAndReduce(WireFormat wire, const Piece& piece, std::byte* to) {
  std::array<float, 16 * kWireGroup> decoded;  // fits in the first-level cache
  for (int64_t at = 0; at < piece.count; at += std::ssize(decoded)) {
    const int64_t count = std::min(std::ssize(decoded), piece.count - at);
    Decode(wire, piece.staging + EncodedBytes(wire, at), {decoded.data(), static_cast<size_t>(count)});
    const auto* const bytes = reinterpret_cast<const std::byte*>(decoded.data());  // NOLINT
    kernel_(to + at * element_bytes_, bytes, count);
  }
}

bool PlanExecutor::AdvanceTransfer(StreamState& state, Transfer& transfer, Tag tag) {
  bool advanced = false;
  for (Piece& piece : transfer.pieces) {
    if (!piece.busy) continue;
    Status status;
    if (!transport_.Test(piece.id, &status)) continue;
    piece.busy = false;
    if (!status.ok()) {
      if (piece.staging != nullptr) free_staging_.push_back(piece.staging);
      result_ = status;
      return true;
    }
    Finish(transfer, piece);
    transfer.ended += piece.count;
    advanced = true;
    if (transfer.is_posted && transfer.ended == transfer.message->slice.count) {
      transfer.is_done = true;
      --state.left;
      return true;
    }
  }
  if (transfer.is_posted) return advanced;
  // Messages between two ranks are matched in order, so a message waits until the one before it is posted.
  if (transfer.before >= 0 && !state.transfers[transfer.before].is_posted) return advanced;
  for (Piece& piece : transfer.pieces) {
    if (piece.busy) continue;
    if (!Post(transfer, tag, piece)) return true;
    advanced = true;
    if (transfer.is_posted) break;
  }
  return advanced;
}

bool PlanExecutor::AdvanceStream(int stream) {
  StreamState& state = streams_[stream];
  const std::vector<Round>& rounds = own_.streams[stream].rounds;
  bool advanced = false;
  while (state.round < rounds.size()) {
    if (!state.started) StartRound(stream);
    for (size_t i = 0; i < state.count; ++i) {
      Transfer& transfer = state.transfers[i];
      if (transfer.is_done) continue;
      advanced |= AdvanceTransfer(state, transfer, tag_ + static_cast<Tag>(stream));
      if (!result_.ok()) return true;
    }
    if (state.left > 0) return advanced;
    advanced = true;
    state.started = false;
    if (++state.round == rounds.size()) --streams_left_;
  }
  return advanced;
}

bool PlanExecutor::Advance() {
  if (!running_) return true;
  for (bool advanced = true; advanced && streams_left_ > 0;) {
    advanced = false;
    for (size_t s = 0; s < streams_.size(); ++s) {
      advanced |= AdvanceStream(static_cast<int>(s));
      if (!result_.ok()) {
        const Status reason = result_;
        Cancel(reason);
        return true;
      }
    }
  }
  if (streams_left_ == 0) running_ = false;
  return !running_;
}

void PlanExecutor::CancelTransfers() {
  for (StreamState& state : streams_) {
    for (size_t i = 0; i < state.count; ++i) {
      for (Piece& piece : state.transfers[i].pieces) {
        if (!piece.busy) continue;
        transport_.Cancel(piece.id);
        piece.busy = false;
        if (piece.staging != nullptr) free_staging_.push_back(piece.staging);
      }
    }
  }
  running_ = false;
}

void PlanExecutor::Cancel(const Status& reason) {
  if (!running_) return;
  CancelTransfers();
  result_ = reason;
}

std::string PlanExecutor::Waiting() const {
  std::string text;
  for (const StreamState& state : streams_) {
    for (size_t i = 0; i < state.count && state.started; ++i) {
      const Transfer& transfer = state.transfers[i];
      if (transfer.is_done) continue;
      const std::string peer =
          fmt::format("rank {} ({})", transfer.message->peer, transfer.is_send ? "send" : "receive");
      if (text.find(peer) != std::string::npos) continue;
      text += (text.empty() ? "" : ", ") + peer;
    }
  }
  return text;
}

}  // namespace moesaic::comm
