// The time limit of a loop that polls.
#pragma once

#include <cstdint>

#include "comm/transport/transport.h"

namespace moesaic::comm {

/// Reads the clock seldom, because that takes as long as a look at the transfers. The limit begins with the
/// first reading.
class PollLimit {
 public:
  PollLimit(const Transport& transport, double seconds) : transport_(transport), seconds_(seconds) {}

  /// Counts a poll. True if the limit has passed.
  bool Passed() {
    if (++polls_ % kPollsBetweenClocks != 0) return false;
    const double now = transport_.Now();
    if (end_ < 0) end_ = now + seconds_;
    return now >= end_;
  }
  uint64_t polls() const { return polls_; }

 private:
  static constexpr int kPollsBetweenClocks = 64;

  const Transport& transport_;
  const double seconds_;
  uint64_t polls_ = 0;
  double end_ = -1;
};

}  // namespace moesaic::comm
