#include "parallel/expert_move.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/collectives/communicator.h"

namespace moesaic::parallel {
namespace {

// After the tags of sums and hidden states; those of exchanges begin at 2^28. A tag has 12 bits of the move
// and 12 of the round: messages of a move that was given up are never matched by one of the next 4095.
constexpr comm::Tag kMoveTags = comm::Tag{3} << comm::kCommunicatorTagBits;
constexpr size_t kMaxRounds = 1 << 12;
constexpr int64_t kPieceBytes = 1 << 20;

comm::Tag TagOf(uint64_t move, size_t round) {
  return kMoveTags | static_cast<comm::Tag>(move & 0xfffU) << 12 | static_cast<comm::Tag>(round);
}

}  // namespace

StatusOr<ExpertMove> ExpertMove::Create(comm::Transport& ranks, uint64_t number,
                                        const LayerPlacement& current, const LayerPlacement& next,
                                        int64_t bytes, OldWeights old_weights, std::byte* next_weights) {
  const int own = ranks.rank();
  ASSIGN_OR_RETURN(const std::vector<TransferRound> rounds, PlanTransfers(current, next));
  if (rounds.size() > kMaxRounds) {
    return InvalidArgument("a move of experts has at most {} rounds, found {}", kMaxRounds, rounds.size());
  }
  ExpertMove move(ranks, number, bytes, std::move(old_weights), next_weights);
  for (size_t slot = 0; slot < next[own].size(); ++slot) {
    const int expert = next[own][slot];
    if (std::ranges::find(current[own], expert) == current[own].end()) continue;
    move.copies_.push_back({.expert = expert, .slot = static_cast<int>(slot)});
  }
  std::ranges::reverse(move.copies_);
  for (size_t round = 0; round < rounds.size(); ++round) {
    OwnRound part = {.number = round, .send = {}, .receive = {}};
    for (const ExpertTransfer& transfer : rounds[round]) {
      if (transfer.from == own) part.send = transfer;
      if (transfer.to == own) part.receive = transfer;
    }
    if (part.send || part.receive) move.rounds_.push_back(part);
  }
  return move;
}

ExpertMove::ExpertMove(comm::Transport& ranks, uint64_t number, int64_t bytes, OldWeights old_weights,
                       std::byte* next_weights)
    : ranks_(&ranks),
      number_(number),
      bytes_(bytes),
      old_weights_(std::move(old_weights)),
      next_(next_weights) {}

ExpertMove::ExpertMove(ExpertMove&& other) noexcept
    : ranks_(other.ranks_),
      number_(other.number_),
      bytes_(other.bytes_),
      old_weights_(std::move(other.old_weights_)),
      next_(other.next_),
      copies_(std::move(other.copies_)),
      rounds_(std::move(other.rounds_)),
      round_(other.round_),
      send_(std::exchange(other.send_, {})),
      receive_(std::exchange(other.receive_, {})),
      sent_bytes_(other.sent_bytes_) {}

ExpertMove::~ExpertMove() {
  for (const ExpertStream* stream : {&send_, &receive_}) {
    if (stream->piece) ranks_->Cancel(*stream->piece);
  }
}

Status ExpertMove::Advance() {
  if (!send_.open() && !receive_.open() && round_ < rounds_.size()) StartRound();
  RETURN_IF_ERROR(AdvanceStream(/*sends=*/false, receive_));
  RETURN_IF_ERROR(AdvanceStream(/*sends=*/true, send_));
  CopyPiece();  // while a round travels
  ranks_->Progress();
  return OkStatus();
}

void ExpertMove::StartRound() {
  const OwnRound& round = rounds_[round_++];
  const comm::Tag tag = TagOf(number_, round.number);
  if (round.receive) receive_ = {.transfer = *round.receive, .tag = tag, .left = bytes_};
  if (round.send) send_ = {.transfer = *round.send, .tag = tag, .left = bytes_};
}

// Pieces of a stream have one tag and follow each other, so that they arrive in order. The checksum is the
// last.
Status ExpertMove::AdvanceStream(bool sends, ExpertStream& stream) {
  if (Status result; stream.piece && ranks_->Test(*stream.piece, &result)) {
    stream.piece.reset();
    RETURN_IF_ERROR(result);
    if (stream.expected != nullptr) {
      const uint64_t expected = *std::exchange(stream.expected, nullptr);
      if (expected == stream.sum.value()) return OkStatus();
      return absl::DataLossError(
          fmt::format("expert {} of rank {} has another checksum than it was sent with",
                      stream.transfer.expert, stream.transfer.from));
    }
    const std::byte* const bytes =
        sends ? old_weights_(stream.transfer.expert) : next_ + stream.transfer.slot * bytes_;
    stream.sum.Add(bytes + stream.summed, static_cast<size_t>(stream.begun - stream.summed));
    stream.summed = stream.begun;
    if (stream.left == 0) {
      stream.expected = std::make_unique<uint64_t>(stream.sum.value());
      const std::span<std::byte> trailer = std::as_writable_bytes(std::span(stream.expected.get(), 1));
      ASSIGN_OR_RETURN(stream.piece, sends ? ranks_->Send(stream.transfer.to, stream.tag, trailer)
                                           : ranks_->Receive(stream.transfer.from, stream.tag, trailer));
    }
  }
  return stream.piece || stream.left == 0 ? OkStatus() : StartPiece(sends, stream);
}

Status ExpertMove::StartPiece(bool sends, ExpertStream& stream) {
  const auto count = static_cast<size_t>(std::min(stream.left, kPieceBytes));
  if (sends) {
    const std::byte* const from = old_weights_(stream.transfer.expert) + stream.begun;
    ASSIGN_OR_RETURN(stream.piece, ranks_->Send(stream.transfer.to, stream.tag, {from, count}));
    sent_bytes_ += static_cast<int64_t>(count);
  } else {
    std::byte* const to = next_ + stream.transfer.slot * bytes_ + stream.begun;
    ASSIGN_OR_RETURN(stream.piece, ranks_->Receive(stream.transfer.from, stream.tag, {to, count}));
  }
  stream.begun += static_cast<int64_t>(count);
  stream.left -= static_cast<int64_t>(count);
  return OkStatus();
}

void ExpertMove::CopyPiece() {
  if (copies_.empty()) return;
  Copy& copy = copies_.back();
  const int64_t count = std::min(bytes_ - copy.done, kPieceBytes);
  std::memcpy(next_ + copy.slot * bytes_ + copy.done, old_weights_(copy.expert) + copy.done,
              static_cast<size_t>(count));
  copy.done += count;
  if (copy.done == bytes_) copies_.pop_back();
}

}  // namespace moesaic::parallel
