#include "engine/rank_messages.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "parallel/job_wait.h"

namespace moesaic::engine {
namespace {

Status WaitFor(comm::Transport& job, int peer, comm::TransferId id, double limit_s) {
  return Annotate(parallel::WaitInJob(job, id, limit_s), fmt::format("waiting for rank {}", peer));
}

using comm::Transport;

Status WaitForPeer(comm::Transport& job, int, comm::TransferId id, double limit_s) {
  return comm::Wait(job, id, limit_s);
}

constexpr uint64_t kMaxMessageBytes = uint64_t{1} << 30;
constexpr size_t kFirstTextBytes = kFirstPartBytes - sizeof(uint64_t);
using FirstPart = std::array<std::byte, kFirstPartBytes>;

comm::Tag TagOf(RankTag tag, bool second) { return static_cast<comm::Tag>(tag) + (second ? 1 : 0); }

// Receives the rest of the message that begins with `first`.
StatusOr<std::string> ReceiveRest(Transport& job, int peer, RankTag tag, std::span<const std::byte> first,
                                  double limit_s) {
  uint64_t size = 0;
  std::memcpy(&size, first.data(), sizeof size);
  if (size > kMaxMessageBytes) {
    return InvalidArgument("rank {} sent a message of {} bytes, more than {}", peer, size, kMaxMessageBytes);
  }
  std::string bytes(size, '\0');
  const size_t head = std::min<size_t>(size, first.size() - sizeof size);
  std::memcpy(bytes.data(), first.data() + sizeof size, head);
  if (size == head) return bytes;
  const std::span<std::byte> rest = std::as_writable_bytes(std::span(bytes)).subspan(head);
  ASSIGN_OR_RETURN(const comm::TransferId id, job.Receive(peer, TagOf(tag, true), rest));
  RETURN_IF_ERROR(WaitFor(job, peer, id, limit_s));
  return bytes;
}

Status SendParts(Transport& job, int peer, RankTag tag, std::string_view bytes, double limit_s,
                 Status (*wait)(Transport&, int, comm::TransferId, double)) {
  FirstPart first{};
  const uint64_t size = bytes.size();
  const size_t head = std::min(bytes.size(), kFirstTextBytes);
  std::memcpy(first.data(), &size, sizeof size);
  std::memcpy(first.data() + sizeof size, bytes.data(), head);
  ASSIGN_OR_RETURN(const comm::TransferId id, job.Send(peer, TagOf(tag, false), first));
  RETURN_IF_ERROR(wait(job, peer, id, limit_s));
  if (head == bytes.size()) return OkStatus();
  const auto rest = std::as_bytes(std::span(bytes)).subspan(head);
  ASSIGN_OR_RETURN(const comm::TransferId rest_id, job.Send(peer, TagOf(tag, true), rest));
  return wait(job, peer, rest_id, limit_s);
}

}  // namespace

bool IsOfPeer(const Status& status) {
  return status.code() == StatusCode::kUnavailable || status.code() == StatusCode::kDeadlineExceeded ||
         status.code() == StatusCode::kCancelled;
}

Status SendMessage(Transport& job, int peer, RankTag tag, std::string_view bytes, double limit_s) {
  return SendParts(job, peer, tag, bytes, limit_s, WaitFor);
}

Status SendLastMessage(Transport& job, int peer, RankTag tag, std::string_view bytes, double limit_s) {
  return SendParts(job, peer, tag, bytes, limit_s, WaitForPeer);
}

StatusOr<std::string> ReceiveMessage(Transport& job, int peer, RankTag tag, double limit_s) {
  FirstPart first;
  ASSIGN_OR_RETURN(const comm::TransferId id, job.Receive(peer, TagOf(tag, false), first));
  RETURN_IF_ERROR(WaitFor(job, peer, id, limit_s));
  return ReceiveRest(job, peer, tag, first, limit_s);
}

Status ReceiveFloats(Transport& job, int peer, RankTag tag, std::span<float> values, double limit_s) {
  ASSIGN_OR_RETURN(const comm::TransferId id,
                   job.Receive(peer, TagOf(tag, false), std::as_writable_bytes(values)));
  return WaitFor(job, peer, id, limit_s);
}

std::string_view MessageReader::Take(size_t count) {
  failed_ |= count > bytes_.size();
  if (failed_) return {};
  const std::string_view part = bytes_.substr(0, count);
  bytes_.remove_prefix(count);
  return part;
}

Status MessageReader::Finish() const {
  if (!failed_ && bytes_.empty()) return OkStatus();
  return InvalidArgument("a message between ranks is malformed; all ranks must run the same version");
}

StatusOr<std::string> AwaitMessage(Transport& job, int peer, RankTag tag, const std::function<Status()>& poll,
                                   double first_limit_s, double limit_s) {
  // Steps follow each other within microseconds; a rank without work for this long sleeps between polls.
  constexpr double kBusySeconds = 0.05;
  constexpr auto kSleep = std::chrono::microseconds(200);
  FirstPart first;
  ASSIGN_OR_RETURN(const comm::TransferId id, job.Receive(peer, TagOf(tag, false), first));
  const double begin = job.Now();
  for (Status result;;) {
    job.Progress();
    if (job.Test(id, &result)) {
      RETURN_IF_ERROR(result);
      return ReceiveRest(job, peer, tag, first, limit_s);
    }
    if (Status ends = poll(); !ends.ok()) {
      job.Cancel(id);
      return ends;
    }
    const double waited = job.Now() - begin;
    if (waited >= first_limit_s) {
      job.Cancel(id);
      return absl::DeadlineExceededError(fmt::format("rank {} sent nothing for {} s", peer, first_limit_s));
    }
    job.Idle();
    if (waited > kBusySeconds) std::this_thread::sleep_for(kSleep);
  }
}

StatusOr<std::string> AwaitLoadedRank(Transport& job, int peer, const std::function<Status()>& check,
                                      double limit_s) {
  constexpr double kLoadSeconds = 3600;
  const auto poll = [&]() -> Status {
    RETURN_IF_ERROR(parallel::CheckRanks(job));
    return check ? check() : OkStatus();
  };
  StatusOr<std::string> reply =
      AwaitMessage(job, peer, RankTag::kReply, poll, std::max(limit_s, kLoadSeconds), limit_s);
  if (!reply.ok()) RETURN_IF_ERROR(parallel::CheckRanks(job));
  return reply;
}

MessageSender::~MessageSender() {
  for (const Message& message : messages_) {
    for (const comm::TransferId id : message.sends) job_.Cancel(id);
  }
}

Status MessageSender::Retire() {
  Status first;
  job_.Progress();
  for (Message& message : messages_) {
    std::erase_if(message.sends, [&](comm::TransferId id) {
      Status result;
      const bool ended = job_.Test(id, &result);
      if (ended && first.ok()) first = std::move(result);
      return ended;
    });
  }
  for (; !messages_.empty() && messages_.front().sends.empty(); messages_.pop_front()) {
    unused_.push_back(std::move(messages_.front().bytes));
  }
  return first;
}

MessageSender::Message& MessageSender::Add(size_t bytes) {
  Message& message = messages_.emplace_back();
  if (!unused_.empty()) {
    message.bytes = std::move(unused_.back());
    unused_.pop_back();
  }
  message.bytes.resize(bytes);
  return message;
}

Status MessageSender::StartFloats(int peer, RankTag tag, std::span<const float> values) {
  RETURN_IF_ERROR(Retire());
  if (values.empty()) return OkStatus();
  Message& message = Add(values.size_bytes());
  std::memcpy(message.bytes.data(), values.data(), values.size_bytes());
  ASSIGN_OR_RETURN(const comm::TransferId id, job_.SendAhead(peer, TagOf(tag, false), message.bytes));
  message.sends.push_back(id);
  return OkStatus();
}

Status MessageSender::Start(std::span<const int> peers, RankTag tag,
                            std::initializer_list<std::string_view> texts, size_t first_part_bytes) {
  RETURN_IF_ERROR(Retire());
  uint64_t size = 0;
  for (const std::string_view text : texts) size += text.size();
  Message& message = Add(std::max<size_t>(first_part_bytes, sizeof size + size));
  std::byte* to = message.bytes.data();
  std::memcpy(to, &size, sizeof size);
  to += sizeof size;
  for (const std::string_view text : texts) {
    if (!text.empty()) std::memcpy(to, text.data(), text.size());
    to += text.size();
  }
  const std::span<const std::byte> all(message.bytes);
  for (const int peer : peers) {
    ASSIGN_OR_RETURN(const comm::TransferId id,
                     job_.SendAhead(peer, TagOf(tag, false), all.first(first_part_bytes)));
    message.sends.push_back(id);
    if (all.size() == first_part_bytes) continue;
    ASSIGN_OR_RETURN(const comm::TransferId rest,
                     job_.SendAhead(peer, TagOf(tag, true), all.subspan(first_part_bytes)));
    message.sends.push_back(rest);
  }
  return OkStatus();
}

Status MessageSender::Finish(double limit_s) {
  for (Message& message : messages_) {
    while (!message.sends.empty()) {
      const comm::TransferId id = message.sends.back();
      message.sends.pop_back();  // the id is invalid after the wait
      RETURN_IF_ERROR(parallel::WaitInJob(job_, id, limit_s));
    }
  }
  return Retire();
}

StatusOr<ExpectedMessage> ExpectedMessage::Start(Transport& job, int peer, RankTag tag,
                                                 size_t first_part_bytes) {
  ExpectedMessage message(job, peer, tag);
  message.first_.resize(first_part_bytes);
  StatusOr<comm::TransferId> id = job.Receive(peer, TagOf(tag, false), message.first_);
  if (!id.ok()) {
    message.job_ = nullptr;
    return id.status();
  }
  message.id_ = *id;
  return message;
}

ExpectedMessage::ExpectedMessage(ExpectedMessage&& other) noexcept
    : job_(std::exchange(other.job_, nullptr)),
      peer_(other.peer_),
      tag_(other.tag_),
      first_(std::move(other.first_)),
      id_(other.id_) {}

ExpectedMessage::~ExpectedMessage() {
  if (job_ != nullptr) job_->Cancel(id_);
}

StatusOr<std::string> ExpectedMessage::Await(double limit_s) {
  Transport& job = *std::exchange(job_, nullptr);
  RETURN_IF_ERROR(WaitFor(job, peer_, id_, limit_s));
  return ReceiveRest(job, peer_, tag_, first_, limit_s);
}

}  // namespace moesaic::engine
