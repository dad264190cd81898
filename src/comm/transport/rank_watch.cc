#include "comm/transport/rank_watch.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>

namespace moesaic::comm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kProbePeriod{250};
// A process that waits for a processor is silent for a moment.
constexpr std::chrono::milliseconds kSilence{1200};

enum class Heard : uint8_t { kNothing, kAnswer, kEnd };

// Reads everything that has arrived.
Heard ReadAll(const Socket& connection) {
  char bytes[64];
  Heard heard = Heard::kNothing;
  for (;;) {
    const ssize_t got = recv(connection.fd(), bytes, sizeof(bytes), MSG_DONTWAIT);
    if (got > 0) {
      heard = Heard::kAnswer;
    } else if (got == 0 || errno != EINTR) {
      return got < 0 && errno == EAGAIN ? heard : Heard::kEnd;
    }
  }
}

// A question or an answer. One that finds no room in the buffers of the connection is not needed: others wait
// there.
void WriteByte(const Socket& connection) {
  constexpr char kByte = 0;
  send(connection.fd(), &kByte, sizeof(kByte), MSG_NOSIGNAL | MSG_DONTWAIT);
}

}  // namespace

StatusOr<std::unique_ptr<RankWatch>> RankWatch::Start(int rank, std::vector<Socket> connections,
                                                      SilenceReport report) {
  std::unique_ptr<RankWatch> watch(new RankWatch(std::move(connections), std::move(report)));
  RankWatch* const self = watch.get();
  try {
    self->thread_ = std::thread([self, rank] { rank == 0 ? self->ProbeRanks() : self->AnswerProbes(); });
  } catch (const std::system_error& error) {
    return ResourceExhausted("rank {}: can't start the thread that answers rank 0: {}", rank, error.what());
  }
  return watch;
}

RankWatch::~RankWatch() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  end_.notify_all();
  for (const Socket& connection : connections_) {
    if (connection.fd() >= 0) shutdown(connection.fd(), SHUT_RDWR);  // ends AnswerProbes()
  }
  if (thread_.joinable()) thread_.join();
}

void RankWatch::ProbeRanks() {
  struct Peer {
    bool open = false, silent = false;
    Clock::time_point heard = Clock::now();
  };
  std::vector<Peer> peers(connections_.size());
  for (size_t rank = 0; rank < peers.size(); ++rank) peers[rank].open = connections_[rank].fd() >= 0;
  Clock::time_point last = Clock::now();
  std::unique_lock lock(mutex_);
  while (!end_.wait_for(lock, kProbePeriod, [this] { return ends_; })) {
    const Clock::time_point now = Clock::now();
    const Clock::duration late = now - std::exchange(last, now) - kProbePeriod;
    for (size_t rank = 0; rank < peers.size(); ++rank) {
      Peer& peer = peers[rank];
      if (!peer.open) continue;
      const Heard heard = ReadAll(connections_[rank]);
      peer.open = heard != Heard::kEnd;
      if (!peer.open) continue;
      WriteByte(connections_[rank]);
      if (heard == Heard::kAnswer) {
        peer.heard = now;
        if (std::exchange(peer.silent, false)) report_(static_cast<int>(rank), 0);
        continue;
      }
      peer.heard += late;  // time in which this thread sent no probe is no silence
      const std::chrono::duration<double> silent = now - peer.heard;
      if (peer.silent || silent < kSilence) continue;
      peer.silent = true;
      report_(static_cast<int>(rank), silent.count());
    }
  }
}

void RankWatch::AnswerProbes() {
  const Socket& rank0 = connections_.front();
  pollfd polled = {rank0.fd(), POLLIN, 0};
  for (;;) {
    poll(&polled, 1, -1);
    const Heard heard = ReadAll(rank0);
    if (heard == Heard::kEnd) return;
    if (heard == Heard::kAnswer) WriteByte(rank0);
  }
}

}  // namespace moesaic::comm
