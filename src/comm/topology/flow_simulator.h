// Discrete-event simulation of messages on a topology. Messages share the channels of their paths max-min
// fairly (Bertsekas and Gallager, Data Networks, section 6.5.2).
#pragma once

#include <cstdint>
#include <queue>
#include <span>
#include <vector>

#include "comm/topology/topology.h"

namespace moesaic::comm {

/// Simulates messages that start while the simulation runs. A message waits for the latency of its path, then
/// its bytes occupy all channels of the path at one rate. Rates are the max-min fair ones at every moment.
/// Not thread-safe.
class FlowSimulator {
 public:
  /// Borrows the topology. Events within `quantum_s` after the earliest one happen at its time: thousands of
  /// messages that end one after the other then need few assignments of rates.
  explicit FlowSimulator(const Topology& topology, double quantum_s = 0);

  /// Starts a message at now() and returns its number; numbers count from 0 over Start() and StartTimer(). A
  /// message from a rank to itself, or of no bytes, takes its latency only.
  int Start(int from, int to, double bytes);
  /// Starts a timer, for example of a local reduction, and returns its number.
  int StartTimer(double seconds);

  /// Returns the seconds since the start of the simulation.
  double now() const { return now_; }
  /// Returns the number of messages and timers that have not completed.
  int active() const { return active_; }

  /// Advances to the earliest completion. Returns all messages and timers that complete then, ascending;
  /// empty when none is active.
  std::vector<int> AdvanceToNextCompletion();

  /// Returns the bytes of all messages started so far, by channel (an index into Topology::channels()).
  const std::vector<double>& channel_bytes() const { return channel_bytes_; }
  /// Returns the current rate of a message in bytes per second: 0 before its latency has passed and after its
  /// completion.
  double rate(int flow);

 private:
  struct Flow {
    std::vector<int> path;       // channels
    std::vector<int> positions;  // indices of this flow in flows_of_channel_, parallel to `path`
    double remaining = 0;        // bytes at `updated`
    double updated = 0;
    double rate = 0;
    uint32_t generation = 0;  // of the event that is valid
    int from = 0, to = 0;
    bool transferring = false;
    bool frozen = false;  // scratch of AssignRates()
  };
  struct Event {
    double time;
    int flow;
    uint32_t generation;
    bool operator>(const Event& other) const {
      return time != other.time ? time > other.time : flow > other.flow;
    }
  };

  void BeginTransfer(int flow);
  void Finish(int flow);
  void MarkChanged(const std::vector<int>& path);
  void AssignRates();
  void SetRate(int flow, double rate);

  const Topology& topology_;
  const double quantum_s_;
  double now_ = 0;
  int active_ = 0;
  std::vector<Flow> flows_;
  std::vector<std::vector<int>> flows_of_channel_;
  std::vector<double> channel_bytes_;
  std::vector<int> changed_;         // channels whose flows changed since the last AssignRates()
  std::vector<uint8_t> is_changed_;  // [channels]
  std::vector<double> left_;         // [channels] scratch: bandwidth that is not assigned
  std::vector<int> unassigned_;      // [channels] scratch: flows without a rate
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
};

/// A message of a simulation whose messages are known in advance.
struct ScheduledFlow {
  int from = 0, to = 0;
  double bytes = 0;
  double start_s = 0;      ///< Earliest start.
  std::vector<int> after;  ///< Messages, by index, that complete before it starts.
};

/// Returns the completion time of each message in seconds. InvalidArgument for ranks, indices or sizes out of
/// range, and for messages that wait for each other. `quantum_s` is that of FlowSimulator.
StatusOr<std::vector<double>> SimulateFlows(const Topology& topology, std::span<const ScheduledFlow> flows,
                                            double quantum_s = 0);

}  // namespace moesaic::comm
