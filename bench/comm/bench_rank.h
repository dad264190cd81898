// Parts that benchmarks of several ranks share. A benchmark cannot continue after an error: it ends the
// process.
#pragma once

#include <errno.h>
#include <fmt/format.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "comm/topology/topology.h"
#include "comm/transport/transport.h"

namespace moesaic::bench {

inline void ExitOn(const Status& status) {
  if (status.ok()) return;
  fmt::print(stderr, "{}: {}\n", program_invocation_short_name, Message(status));
  std::exit(1);
}

template <typename T>
T Succeed(StatusOr<T> value) {
  ExitOn(value.status());
  return *std::move(value);
}

inline std::string ReadText(const std::string& path) {
  std::ifstream file(path);
  if (!file) ExitOn(InvalidArgument("{} cannot be read", path));
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

inline comm::Topology ReadTopology(const std::string& path) {
  return Succeed(comm::Topology::Parse(ReadText(path), path));
}

/// Waits for a transfer that was started.
inline void Await(comm::Transport& transport, StatusOr<comm::TransferId> id, double limit_s) {
  ExitOn(comm::Wait(transport, Succeed(std::move(id)), limit_s));
}

/// Adds the values of all other ranks to those of rank 0, which returns the sums; others return their own.
inline std::vector<double> SumOfAll(comm::Transport& transport, comm::Tag tag, std::vector<double> values,
                                    double limit_s) {
  const auto bytes = [](std::vector<double>& at) { return std::as_writable_bytes(std::span(at)); };
  if (transport.rank() > 0) {
    Await(transport, transport.Send(0, tag, bytes(values)), limit_s);
    return values;
  }
  std::vector<double> other(values.size());
  for (int peer = 1; peer < transport.size(); ++peer) {
    Await(transport, transport.Receive(peer, tag, bytes(other)), limit_s);
    for (size_t i = 0; i < values.size(); ++i) values[i] += other[i];
  }
  return values;
}

/// Returns the maximum over the ranks on each of them, and on none before all have called.
inline double MaximumOfAll(comm::Transport& transport, comm::Tag tag, double value, double limit_s) {
  const auto bytes = [](double& at) { return std::as_writable_bytes(std::span(&at, 1)); };
  if (transport.rank() > 0) {
    Await(transport, transport.Send(0, tag, bytes(value)), limit_s);
    Await(transport, transport.Receive(0, tag, bytes(value)), limit_s);
    return value;
  }
  for (int peer = 1; peer < transport.size(); ++peer) {
    double other = 0;
    Await(transport, transport.Receive(peer, tag, bytes(other)), limit_s);
    value = std::max(value, other);
  }
  for (int peer = 1; peer < transport.size(); ++peer)
    Await(transport, transport.Send(peer, tag, bytes(value)), limit_s);
  return value;
}

/// Lets a rank wait on a simulated clock; empty where the clock is real.
using SimulatedSleep = std::function<void(int rank, double seconds)>;

/// Returns the sleep of SMPI in programs that smpi_program.sh builds.
inline SimulatedSleep SleepOfSmpi() {
#ifdef MOESAIC_SMPI
  return [](int, double seconds) {
    timespec time{static_cast<time_t>(seconds), std::lround(std::fmod(seconds, 1) * 1e9)};
    nanosleep(&time, nullptr);
  };
#else
  return {};
#endif
}

/// Returns the time at which all ranks start. A barrier ends at another time on each rank, by the latencies
/// of its messages. On a simulated clock, ranks therefore wait for one moment: otherwise the time of the
/// operation that follows would contain that of the barrier.
inline double StartTogether(comm::Transport& transport, comm::Tag tag, const SimulatedSleep& pause,
                            double limit_s) {
  constexpr double kBarrierSeconds = 0.05;  // more than a barrier takes; costs no real time
  const double start = MaximumOfAll(transport, tag, transport.Now(), limit_s) + kBarrierSeconds;
  if (!pause) return transport.Now();
  pause(transport.rank(), start - transport.Now());
  return start;
}

}  // namespace moesaic::bench
