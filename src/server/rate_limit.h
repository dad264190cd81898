// Limits per minute, as token buckets.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace moesaic::server {

/// Units per minute; 0: no limit.
struct RateLimits {
  int64_t requests = 0;
  int64_t tokens = 0;
  bool operator==(const RateLimits&) const = default;
};

/// A bucket of `per_minute` units that refills evenly and starts full. Any thread.
class TokenBucket {
 public:
  using Clock = std::chrono::steady_clock;

  struct State {
    int64_t limit = 0;      ///< 0: no limit, and the rest means nothing
    int64_t remaining = 0;  ///< whole units, never below 0
    double reset = 0;       ///< seconds until the bucket is full
    double wait = 0;        ///< seconds until one unit is there; 0: there is one
  };

  /// Keeps the units that are there, as far as the new limit allows.
  void SetLimit(int64_t per_minute, Clock::time_point now = Clock::now());
  /// Takes one unit; false, and nothing taken, when there is less than one.
  bool TryTake(Clock::time_point now = Clock::now());
  /// Takes `units` that have been used already, so that the bucket may go below zero.
  void Charge(int64_t units, Clock::time_point now = Clock::now());
  State Look(Clock::time_point now = Clock::now()) const;

 private:
  void Refill(Clock::time_point now) const;

  mutable std::mutex mutex_;
  int64_t limit_ = 0;
  mutable double units_ = 0;
  mutable Clock::time_point filled_{};
};

/// OpenAI's x-ratelimit-* headers of one key's two buckets; without those that have no limit.
std::vector<std::pair<std::string, std::string>> RateLimitHeaders(const TokenBucket::State& requests,
                                                                  const TokenBucket::State& tokens);

}  // namespace moesaic::server
