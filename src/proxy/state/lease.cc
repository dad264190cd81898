#include "proxy/state/lease.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace moesaic::proxy {

bool ProcessLives(int32_t pid) {
  if (pid <= 0) return false;
  if (kill(pid, 0) != 0 && errno == ESRCH) return false;
  // A killed process whose parent has not waited for it yet still has its pid: state Z in /proc.
  char path[32], text[256];
  std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return errno != ENOENT;
  const ssize_t size = read(file, text, sizeof text - 1);
  close(file);
  if (size <= 0) return false;  // it ended meanwhile
  text[size] = 0;
  const char* const name_end = std::strrchr(text, ')');  // the name may hold any character
  return name_end == nullptr || name_end[1] == 0 || (name_end[2] != 'Z' && name_end[2] != 'X');
}

std::optional<LeaseToken> Lease::Acquire(int32_t pid, Nanos now, const LeaseOptions& options, int32_t dead) {
  uint64_t word = word_.load(std::memory_order_acquire);
  const auto holder = static_cast<int32_t>(word >> 32);
  if (holder == pid) {
    const LeaseToken token = {word};
    if (Renew(token, now)) return token;
    word = word_.load(std::memory_order_acquire);
  }
  if (const auto other = static_cast<int32_t>(word >> 32); other != 0 && other != dead) {
    const Nanos age = now - renewed();
    // A living holder renews in time; asking the kernel about it costs a system call.
    if (age <= 2 * options.renew) return std::nullopt;
    if (age <= options.timeout && ProcessLives(static_cast<int32_t>(word >> 32))) return std::nullopt;
  }
  // Written before the word, so that no third process finds the new tenure expired.
  renewed_.store(now, std::memory_order_release);
  const LeaseToken token = {static_cast<uint64_t>(pid) << 32 | static_cast<uint32_t>(word + 1)};
  if (!word_.compare_exchange_strong(word, token.word, std::memory_order_acq_rel)) return std::nullopt;
  return token;
}

bool Lease::Renew(LeaseToken token, Nanos now) {
  if (!Holds(token)) return false;
  renewed_.store(now, std::memory_order_release);
  return true;
}

void Lease::Release(LeaseToken token) {
  uint64_t word = token.word;
  word_.compare_exchange_strong(word, static_cast<uint32_t>(token.word), std::memory_order_acq_rel);
}

}  // namespace moesaic::proxy
