// Ownership of sockets.
#pragma once

#include <unistd.h>

#include <utility>

namespace moesaic::comm {

/// Closes its descriptor.
class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) close(fd_);
  }
  int fd() const { return fd_; }  ///< -1: none

 private:
  int fd_;
};

}  // namespace moesaic::comm
