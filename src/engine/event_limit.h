// Limits the log lines about events that may be frequent.
#pragma once

#include <chrono>
#include <cstdint>
#include <utility>

#include "engine/request.h"

namespace moesaic::engine {

/// Counts events and decides when a line reports them. Not thread-safe.
class EventLimit {
 public:
  static constexpr std::chrono::seconds kInterval{10};

  /// Adds `events`. Returns the number since the last line if a line is due, otherwise 0.
  int64_t Count(int64_t events, Clock::time_point now) {
    waiting_ += events;
    if (waiting_ == 0 || now < next_) return 0;
    next_ = now + kInterval;
    return std::exchange(waiting_, 0);
  }

 private:
  Clock::time_point next_ = Clock::time_point::min();
  int64_t waiting_ = 0;  // events since the last line
};

}  // namespace moesaic::engine
