#include "comm/transport/virtual_clock.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/check.h"

namespace moesaic::comm {
namespace {

// Ranks notice expired time limits at this resolution.
constexpr double kNotifyAllSeconds = 0.5;

}  // namespace

VirtualClock::VirtualClock(const Topology& topology, double quantum_s, int ranks, Arrival arrival)
    : arrival_(std::move(arrival)), flows_(topology, quantum_s), running_(ranks), live_(ranks) {
  for (int rank = 0; rank < ranks; ++rank) ranks_.push_back(std::make_unique<Rank>());
}

int VirtualClock::Add(const Ticket& ticket) {
  int number = static_cast<int>(tickets_.size());
  if (free_tickets_.empty()) {
    tickets_.emplace_back();
  } else {
    number = free_tickets_.back();
    free_tickets_.pop_back();
  }
  tickets_[number] = ticket;
  tickets_[number].order = starts_++;
  pending_.push_back(number);
  return number;
}

int VirtualClock::Start(int from, int to, uint32_t tag, size_t bytes, void* sender, void* receiver) {
  const std::lock_guard lock(mutex_);
  return Add({.from = from, .to = to, .tag = tag, .bytes = bytes, .sender = sender, .receiver = receiver});
}

void VirtualClock::Sleep(int rank, double seconds) {
  const auto asleep = [&] {
    const std::lock_guard lock(mutex_);
    return ranks_[rank]->asleep;
  };
  {
    const std::lock_guard lock(mutex_);
    Add({.from = rank, .to = rank, .sleep_s = std::max(seconds, 0.0)});
    ranks_[rank]->asleep = true;
  }
  while (asleep()) Idle(rank);
}

void VirtualClock::Detach(int ticket, const void* side) {
  const std::lock_guard lock(mutex_);
  Ticket& found = tickets_[ticket];
  if (found.sender == side) found.sender = nullptr;
  if (found.receiver == side) found.receiver = nullptr;
}

void VirtualClock::Notify(Rank& rank) {
  ++rank.notified;
  if (!rank.idle) return;
  rank.idle = false;
  ++running_;
  rank.wake.notify_one();
}

void VirtualClock::NotifyAll() {
  const std::lock_guard lock(mutex_);
  for (const auto& rank : ranks_) Notify(*rank);
}

void VirtualClock::Idle(int rank) {
  std::unique_lock lock(mutex_);
  Rank& self = *ranks_[rank];
  if (self.notified == self.seen && !self.left) {
    self.idle = true;
    if (--running_ == 0) Advance();
    self.wake.wait(lock, [&] { return self.notified != self.seen; });
  }
  self.seen = self.notified;
}

void VirtualClock::Leave(int rank) {
  const std::lock_guard lock(mutex_);
  Rank& self = *ranks_[rank];
  if (self.left) return;
  MOESAIC_CHECK(!self.idle);
  self.left = true;
  --live_;
  if (--running_ == 0 && live_ > 0) Advance();
}

// Threads start the messages of one moment in any order; the simulator sees them in one order.
void VirtualClock::StartPending() {
  std::ranges::sort(pending_, {}, [&](int ticket) {
    const Ticket& t = tickets_[ticket];
    return std::tuple(t.from, t.to, t.tag, t.order);
  });
  for (const int ticket : pending_) {
    const Ticket& t = tickets_[ticket];
    const int flow = t.sleep_s >= 0 ? flows_.StartTimer(t.sleep_s)
                                    : flows_.Start(t.from, t.to, static_cast<double>(t.bytes));
    ticket_of_flow_.resize(flow + 1, -1);
    ticket_of_flow_[flow] = ticket;
  }
  pending_.clear();
}

void VirtualClock::Advance() {
  StartPending();
  while (running_ == 0) {
    // Without a message in flight nothing happens any more except that time limits expire.
    const bool stalled = flows_.active() == 0;
    if (stalled) ticket_of_flow_.resize(flows_.StartTimer(2 * kNotifyAllSeconds) + 1, -1);
    for (const int flow : flows_.AdvanceToNextCompletion()) {
      const int ticket = ticket_of_flow_[flow];
      if (ticket < 0) continue;
      now_.store(flows_.now(), std::memory_order_relaxed);
      const Ticket t = tickets_[ticket];
      free_tickets_.push_back(ticket);
      if (t.sleep_s >= 0) {
        ranks_[t.from]->asleep = false;
        Notify(*ranks_[t.from]);
        continue;
      }
      arrival_(t.sender, t.receiver);
      if (t.sender != nullptr) Notify(*ranks_[t.from]);
      if (t.receiver != nullptr && t.from != t.to) Notify(*ranks_[t.to]);
    }
    now_.store(flows_.now(), std::memory_order_relaxed);
    if (flows_.now() < last_notify_all_ + kNotifyAllSeconds) continue;
    last_notify_all_ = flows_.now();
    for (const auto& rank : ranks_) {
      if (!rank->left) Notify(*rank);
    }
  }
}

}  // namespace moesaic::comm
