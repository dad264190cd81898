// Implements limits per minute as token buckets.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace moesaic::server {

/// Units per minute. 0 means no limit.
struct RateLimits {
  int64_t requests = 0;
  int64_t tokens = 0;
  bool operator==(const RateLimits&) const = default;
};

/// A bucket of `per_minute` units that starts full and refills evenly. Any thread may call all methods.
class TokenBucket {
 public:
  using Clock = std::chrono::steady_clock;

  struct State {
    int64_t limit = 0;      ///< units per minute; 0 for no limit, and the other members have no meaning
    int64_t remaining = 0;  ///< whole units, at least 0
    double reset = 0;       ///< seconds until the bucket is full
    double wait = 0;        ///< seconds until the bucket has one unit; 0 if it has one
  };

  /// Changes the limit. Keeps the units in the bucket up to the new limit.
  void SetLimit(int64_t per_minute, Clock::time_point now = Clock::now());
  /// Takes one unit. Returns false and takes nothing when there is less than one.
  bool TryTake(Clock::time_point now = Clock::now());
  /// Takes `units` that were used already, so that the bucket may become negative.
  void Charge(int64_t units, Clock::time_point now = Clock::now());
  State Look(Clock::time_point now = Clock::now()) const;

 private:
  void Refill(Clock::time_point now) const;

  mutable std::mutex mutex_;
  int64_t limit_ = 0;
  mutable double units_ = 0;
  mutable Clock::time_point filled_{};
};

/// Returns OpenAI's x-ratelimit-* headers for one key's two buckets. Leaves out a bucket without a limit.
std::vector<std::pair<std::string, std::string>> RateLimitHeaders(const TokenBucket::State& requests,
                                                                  const TokenBucket::State& tokens);

}  // namespace moesaic::server
