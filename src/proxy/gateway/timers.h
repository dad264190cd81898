// Timers of a worker: the transport provides one, and this set multiplexes it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "proxy/state/stage.h"

namespace moesaic::proxy {

class Timers;

/// A one-shot timer. Destruction cancels it.
class Timer {
 public:
  explicit Timer(Timers& timers) : timers_(timers) {}
  ~Timer() { Cancel(); }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  /// Calls `callback` once at `when`; replaces an earlier call.
  void At(Nanos when, std::function<void()> callback);
  void Cancel();
  bool armed() const { return position_.has_value(); }

 private:
  friend class Timers;
  Timers& timers_;
  uint64_t set_ = 0;  // number of the call of At
  std::function<void()> callback_;
  std::optional<std::multimap<Nanos, Timer*>::iterator> position_;
};

class Timers {
 public:
  /// `on_earlier` runs when a timer becomes the first one.
  explicit Timers(std::function<void()> on_earlier) : on_earlier_(std::move(on_earlier)) {}

  /// Runs what is due. Callbacks may set and cancel timers. Those that they set run in the next call, so that
  /// a callback that sets itself again lets other events run.
  void Run(Nanos now) {
    const uint64_t last = calls_;
    auto next = due_.begin();
    while (next != due_.end() && next->first <= now) {
      Timer& timer = *next->second;
      if (timer.set_ > last) {
        ++next;
        continue;
      }
      due_.erase(next);
      timer.position_.reset();
      const std::function<void()> callback = std::move(timer.callback_);
      callback();  // may destroy the timer
      next = due_.begin();
    }
  }
  std::optional<Nanos> Next() const {
    if (due_.empty()) return std::nullopt;
    return due_.begin()->first;
  }

 private:
  friend class Timer;
  std::function<void()> on_earlier_;
  uint64_t calls_ = 0;
  std::multimap<Nanos, Timer*> due_;
};

inline void Timer::At(Nanos when, std::function<void()> callback) {
  Cancel();
  callback_ = std::move(callback);
  set_ = ++timers_.calls_;
  position_ = timers_.due_.emplace(when, this);
  if (*position_ == timers_.due_.begin()) timers_.on_earlier_();
}

inline void Timer::Cancel() {
  if (!position_) return;
  timers_.due_.erase(*position_);
  position_.reset();
}

}  // namespace moesaic::proxy
