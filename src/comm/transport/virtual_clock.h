// Virtual time of ranks that are threads. While every rank waits, time advances from one completed message to
// the next.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/topology/flow_simulator.h"

namespace moesaic::comm {

/// Thread-safe. Results do not depend on the order in which the threads run.
class VirtualClock {
 public:
  /// Called when a message arrives, under the clock's lock: it must not call the clock.
  using Arrival = std::function<void(void* sender, void* receiver)>;

  VirtualClock(const Topology& topology, double quantum_s, int ranks, Arrival arrival);

  double now() const { return now_.load(std::memory_order_relaxed); }
  /// Starts a message at now(). Returns its ticket, which is valid until it arrives.
  int Start(int from, int to, uint32_t tag, size_t bytes, void* sender, void* receiver);
  /// Removes one side of a message, which still arrives: Arrival gets null in place of this pointer.
  void Detach(int ticket, const void* side);

  /// Waits until a message of the rank arrives, the rank is notified, or about a second of virtual time has
  /// passed.
  void Idle(int rank);
  /// Sleeps for `seconds` of virtual time. Messages of the rank advance meanwhile.
  void Sleep(int rank, double seconds);
  void NotifyAll();
  /// Declares that the rank makes no more calls. Time advances without it.
  void Leave(int rank);

 private:
  struct Ticket {
    int from = 0, to = 0;
    uint32_t tag = 0;
    uint64_t order = 0;  // of starts
    size_t bytes = 0;
    double sleep_s = -1;  // of a sleep, which is no message; otherwise negative
    void* sender = nullptr;
    void* receiver = nullptr;
  };
  struct Rank {
    std::condition_variable wake;
    uint64_t notified = 0, seen = 0;
    bool idle = false, left = false, asleep = false;
  };

  int Add(const Ticket& ticket);
  void Notify(Rank& rank);
  void Advance();
  void StartPending();

  const Arrival arrival_;
  std::atomic<double> now_ = 0;
  std::mutex mutex_;
  FlowSimulator flows_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  int running_;  // ranks that are neither idle nor left
  int live_;     // ranks that have not left
  double last_notify_all_ = 0;
  uint64_t starts_ = 0;
  std::vector<Ticket> tickets_;
  std::vector<int> free_tickets_, pending_;
  std::vector<int> ticket_of_flow_;  // -1: a timer
};

}  // namespace moesaic::comm
