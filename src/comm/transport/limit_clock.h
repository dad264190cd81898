// The clock of a rank's time limits.
#pragma once

#include <algorithm>
#include <chrono>

namespace moesaic::comm {

/// Counts the seconds in which a rank looks for messages. A rank that was stopped, or whose machine was,
/// reads the messages that arrived meanwhile before a limit may expire. Its peers often were stopped with it,
/// as by a container's freezer or a virtual machine's snapshot, and send the missing messages only after they
/// continue. Also used for durations, of which a gap counts kMaxGapSeconds at most. One thread at a time.
class LimitClock {
 public:
  /// Longest time between two calls that counts. Ranks that wait call much more often, and idle ones twice a
  /// second; one that computes does not wait.
  static constexpr double kMaxGapSeconds = 1;

  double Now() { return At(std::chrono::duration<double>(Steady::now().time_since_epoch()).count()); }
  /// The same at a given time of the steady clock, in seconds; times must not decrease.
  double At(double steady) {
    now_ += std::min(steady - last_, kMaxGapSeconds);
    last_ = steady;
    return now_;
  }

 private:
  using Steady = std::chrono::steady_clock;
  double last_ = 0, now_ = 0;
};

}  // namespace moesaic::comm
