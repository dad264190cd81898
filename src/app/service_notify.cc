#include "app/service_notify.h"

#include <fmt/format.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace moesaic::app {
namespace {

using std::chrono::microseconds;
using std::chrono::steady_clock;

int64_t NumberIn(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? 0 : std::strtoll(text, nullptr, 10);
}

}  // namespace

ServiceNotifier::ServiceNotifier() {
  const char* path = std::getenv("NOTIFY_SOCKET");
  if (path == nullptr || std::strlen(path) >= sizeof(sockaddr_un::sun_path)) return;
  if (path[0] != '/' && path[0] != '@') return;
  address_ = path;
  if (address_[0] == '@') address_[0] = '\0';  // abstract namespace of Linux
  socket_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const int64_t period = NumberIn("WATCHDOG_USEC"), process = NumberIn("WATCHDOG_PID");
  if (period > 1 && (process == 0 || process == getpid())) watchdog_period_ = microseconds(period / 2);
}

ServiceNotifier::~ServiceNotifier() {
  if (socket_ >= 0) close(socket_);
}

void ServiceNotifier::Send(std::string_view state) const {
  if (socket_ < 0) return;
  sockaddr_un to{};
  to.sun_family = AF_UNIX;
  std::memcpy(to.sun_path, address_.data(), address_.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address_.size());
  // Serving continues if the manager does not listen.
  [[maybe_unused]] const ssize_t sent =
      sendto(socket_, state.data(), state.size(), MSG_NOSIGNAL | MSG_DONTWAIT,
             reinterpret_cast<const sockaddr*>(&to), size);
}

void ServiceNotifier::Reloading() const {
  const auto now = std::chrono::duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
  Send(fmt::format("RELOADING=1\nMONOTONIC_USEC={}", now));  // steady_clock is CLOCK_MONOTONIC
}

void Watchdog::Check(bool idle, uint64_t progress) {
  const auto period = notifier_.watchdog_period();
  const auto now = steady_clock::now();
  if (!period || now - last_ < *period || (!idle && progress == progress_)) return;
  last_ = now;
  progress_ = progress;
  notifier_.Send("WATCHDOG=1");
}

}  // namespace moesaic::app
