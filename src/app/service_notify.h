// Reports the server's state to the service manager, as sd_notify(3) describes.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace moesaic::app {

/// Sends datagrams to the socket of $NOTIFY_SOCKET. Without that variable all calls do nothing.
class ServiceNotifier {
 public:
  ServiceNotifier();
  ~ServiceNotifier();
  ServiceNotifier(const ServiceNotifier&) = delete;
  ServiceNotifier& operator=(const ServiceNotifier&) = delete;

  /// `state` has lines such as "READY=1".
  void Send(std::string_view state) const;
  void Reloading() const;

  /// Returns half of $WATCHDOG_USEC if the manager expects WATCHDOG=1 from this process.
  std::optional<std::chrono::microseconds> watchdog_period() const { return watchdog_period_; }

 private:
  int socket_ = -1;
  std::string address_;  // in the form of sun_path
  std::optional<std::chrono::microseconds> watchdog_period_;
};

/// Sends WATCHDOG=1 every half watchdog period while the engine makes progress. Must be called often, from
/// one thread.
class Watchdog {
 public:
  explicit Watchdog(const ServiceNotifier& notifier) : notifier_(notifier) {}

  /// `progress` increases while the engine works; it may be constant while the engine is idle.
  void Check(bool idle, uint64_t progress);

 private:
  const ServiceNotifier& notifier_;
  std::chrono::steady_clock::time_point last_{};
  uint64_t progress_ = 0;
};

}  // namespace moesaic::app
