// A time limit that is moved far more often than it is met. Only the transport includes it.
#pragma once

#include <boost/asio/steady_timer.hpp>
#include <chrono>
#include <memory>
#include <utility>

namespace moesaic::server {

/// A timer with a limit. To move the limit to a later time, or to remove it, costs one comparison, because
/// the timer checks the limit again when it fires. Call all methods on the strand of the executor. A pending
/// timer keeps the owner alive until Cancel.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Deadline(const boost::asio::any_io_executor& executor) : timer_(executor) {}

  /// `owner->OnExpired()` runs once when `limit` has passed without another call of Set, Clear or Cancel.
  template <typename Owner>
  void Set(std::chrono::milliseconds limit, std::shared_ptr<Owner> owner) {
    at_ = Clock::now() + limit;
    if (armed_ > at_) Arm(std::move(owner));
  }
  /// Removes the limit. The pending timer still keeps the owner alive.
  void Clear() { at_ = Clock::time_point::max(); }
  /// Removes the limit and the pending timer.
  void Cancel() {
    Clear();
    timer_.cancel();
  }

 private:
  template <typename Owner>
  void Arm(std::shared_ptr<Owner> owner) {
    armed_ = at_;
    timer_.expires_at(at_);
    timer_.async_wait([this, owner = std::move(owner)](const boost::system::error_code& error) mutable {
      if (error) return;  // replaced by an earlier limit, or cancelled
      armed_ = Clock::time_point::max();
      if (at_ == Clock::time_point::max()) return;
      if (at_ > Clock::now()) return Arm(std::move(owner));
      Clear();
      owner->OnExpired();
    });
  }

  boost::asio::steady_timer timer_;
  Clock::time_point at_ = Clock::time_point::max();
  Clock::time_point armed_ = Clock::time_point::max();
};

}  // namespace moesaic::server
