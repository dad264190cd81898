// The rate of events.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>

#include "engine/request.h"

namespace moesaic::engine {

/// Measures the mean time between about the last 64 events. A pause counts as at most a minute or 16 means,
/// so that a long idle time does not distort the mean.
class EventRate {
 public:
  void Count(Clock::time_point now) {
    if (last_) {
      double seconds = std::chrono::duration<double>(now - *last_).count();
      seconds = std::min(seconds, std::max(kPauseSeconds, kPauseMeans * seconds_between_));
      seconds_between_ += (seconds - seconds_between_) / static_cast<double>(std::min(events_, kEvents));
    }
    last_ = now;
    ++events_;
  }
  double seconds_between() const { return seconds_between_; }  ///< 0 before the second event

 private:
  static constexpr double kPauseSeconds = 60, kPauseMeans = 16;
  static constexpr int64_t kEvents = 64;

  std::optional<Clock::time_point> last_;
  int64_t events_ = 0;
  double seconds_between_ = 0;
};

}  // namespace moesaic::engine
