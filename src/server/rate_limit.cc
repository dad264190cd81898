#include "server/rate_limit.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace moesaic::server {
namespace {

constexpr double kMinute = 60;

// Prints a duration in OpenAI's form: "250ms", "12s", "1m5s".
std::string Duration(double seconds) {
  if (seconds < 1) return fmt::format("{}ms", static_cast<int64_t>(std::ceil(seconds * 1000)));
  const auto whole = static_cast<int64_t>(std::ceil(seconds));
  return whole < 60 ? fmt::format("{}s", whole) : fmt::format("{}m{}s", whole / 60, whole % 60);
}

}  // namespace

void TokenBucket::SetLimit(int64_t per_minute, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  if (limit_ == per_minute) return;
  Refill(now);
  units_ = limit_ == 0 ? static_cast<double>(per_minute) : std::min(units_, static_cast<double>(per_minute));
  limit_ = per_minute;
  filled_ = now;
}

void TokenBucket::Refill(Clock::time_point now) const {
  if (now <= filled_) return;
  const double seconds = std::chrono::duration<double>(now - filled_).count();
  const auto most = static_cast<double>(limit_);
  units_ = std::min(most, units_ + seconds * most / kMinute);
  filled_ = now;
}

bool TokenBucket::TryTake(Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  if (limit_ == 0) return true;
  Refill(now);
  if (units_ < 1) return false;
  units_ -= 1;
  return true;
}

void TokenBucket::Charge(int64_t units, Clock::time_point now) {
  const std::lock_guard lock(mutex_);
  if (limit_ == 0) return;
  Refill(now);
  units_ -= static_cast<double>(units);
}

TokenBucket::State TokenBucket::Look(Clock::time_point now) const {
  const std::lock_guard lock(mutex_);
  if (limit_ == 0) return {};
  Refill(now);
  const double rate = static_cast<double>(limit_) / kMinute;
  return {.limit = limit_,
          .remaining = std::max<int64_t>(0, static_cast<int64_t>(units_)),
          .reset = (static_cast<double>(limit_) - units_) / rate,
          .wait = units_ >= 1 ? 0 : (1 - units_) / rate};
}

std::vector<std::pair<std::string, std::string>> RateLimitHeaders(const TokenBucket::State& requests,
                                                                  const TokenBucket::State& tokens) {
  std::vector<std::pair<std::string, std::string>> headers;
  for (const auto& [name, state] : {std::pair{"requests", &requests}, std::pair{"tokens", &tokens}}) {
    if (state->limit == 0) continue;
    headers.emplace_back(fmt::format("x-ratelimit-limit-{}", name), std::to_string(state->limit));
    headers.emplace_back(fmt::format("x-ratelimit-remaining-{}", name), std::to_string(state->remaining));
    headers.emplace_back(fmt::format("x-ratelimit-reset-{}", name), Duration(state->reset));
  }
  return headers;
}

}  // namespace moesaic::server
