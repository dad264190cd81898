#include "engine/rank_messages.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <thread>

namespace moesaic::engine {
namespace {

using comm::Transport;

constexpr uint64_t kMaxMessageBytes = uint64_t{1} << 30;
constexpr size_t kFirstTextBytes = kFirstPartBytes - sizeof(uint64_t);
using FirstPart = std::array<std::byte, kFirstPartBytes>;

comm::Tag TagOf(RankTag tag, bool second) { return static_cast<comm::Tag>(tag) + (second ? 1 : 0); }

// Receives the rest of the message that begins with `first`.
StatusOr<std::string> ReceiveRest(Transport& job, int peer, RankTag tag, const FirstPart& first,
                                  double limit_s) {
  uint64_t size = 0;
  std::memcpy(&size, first.data(), sizeof size);
  if (size > kMaxMessageBytes) {
    return InvalidArgument("rank {} sent a message of {} bytes, more than {}", peer, size, kMaxMessageBytes);
  }
  std::string bytes(size, '\0');
  const size_t head = std::min<size_t>(size, kFirstTextBytes);
  std::memcpy(bytes.data(), first.data() + sizeof size, head);
  if (size == head) return bytes;
  const std::span<std::byte> rest = std::as_writable_bytes(std::span(bytes)).subspan(head);
  ASSIGN_OR_RETURN(const comm::TransferId id, job.Receive(peer, TagOf(tag, true), rest));
  RETURN_IF_ERROR(comm::Wait(job, id, limit_s));
  return bytes;
}

}  // namespace

Status SendMessage(Transport& job, int peer, RankTag tag, std::string_view bytes, double limit_s) {
  FirstPart first{};
  const uint64_t size = bytes.size();
  const size_t head = std::min(bytes.size(), kFirstTextBytes);
  std::memcpy(first.data(), &size, sizeof size);
  std::memcpy(first.data() + sizeof size, bytes.data(), head);
  ASSIGN_OR_RETURN(const comm::TransferId id, job.Send(peer, TagOf(tag, false), first));
  RETURN_IF_ERROR(comm::Wait(job, id, limit_s));
  if (head == bytes.size()) return OkStatus();
  const auto rest = std::as_bytes(std::span(bytes)).subspan(head);
  ASSIGN_OR_RETURN(const comm::TransferId rest_id, job.Send(peer, TagOf(tag, true), rest));
  return comm::Wait(job, rest_id, limit_s);
}

StatusOr<std::string> ReceiveMessage(Transport& job, int peer, RankTag tag, double limit_s) {
  FirstPart first;
  ASSIGN_OR_RETURN(const comm::TransferId id, job.Receive(peer, TagOf(tag, false), first));
  RETURN_IF_ERROR(comm::Wait(job, id, limit_s));
  return ReceiveRest(job, peer, tag, first, limit_s);
}

StatusOr<std::string> AwaitMessage(Transport& job, int peer, RankTag tag, const std::function<bool()>& stop,
                                   double limit_s) {
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
    if (stop && stop()) {
      job.Cancel(id);
      return Cancelled("the rank was stopped");
    }
    job.Idle();
    if (job.Now() - begin > kBusySeconds) std::this_thread::sleep_for(kSleep);
  }
}

}  // namespace moesaic::engine
