// Records the calls of fsync, fdatasync and rename of a test program. One file of the program includes this
// header, because it defines these functions.
#pragma once

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace moesaic::runtime {

/// The calls since its construction, as "fsync PATH", "fdatasync PATH" or "rename NEW-PATH". One at a time.
class SyncLog {
 public:
  SyncLog() { Set(this); }
  ~SyncLog() { Set(nullptr); }
  SyncLog(const SyncLog&) = delete;
  SyncLog& operator=(const SyncLog&) = delete;

  std::vector<std::string> Take() {
    const std::scoped_lock lock(mutex_);
    return std::exchange(calls_, {});
  }
  static void Record(const char* call, const std::string& path) {
    const std::scoped_lock lock(mutex_);
    if (current_ != nullptr) current_->calls_.push_back(std::string(call) + " " + path);
  }
  static std::string PathOf(int descriptor) {
    std::array<char, 4096> path{};
    const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
    const ssize_t length = readlink(link.c_str(), path.data(), path.size());
    return length < 0 ? std::string() : std::string(path.data(), static_cast<size_t>(length));
  }

 private:
  static void Set(SyncLog* log) {
    const std::scoped_lock lock(mutex_);
    current_ = log;
  }

  static inline std::mutex mutex_;
  static inline SyncLog* current_ = nullptr;
  std::vector<std::string> calls_;
};

}  // namespace moesaic::runtime

extern "C" {

int fsync(int descriptor) {
  moesaic::runtime::SyncLog::Record("fsync", moesaic::runtime::SyncLog::PathOf(descriptor));
  return static_cast<int>(syscall(SYS_fsync, descriptor));
}

int fdatasync(int descriptor) {
  moesaic::runtime::SyncLog::Record("fdatasync", moesaic::runtime::SyncLog::PathOf(descriptor));
  return static_cast<int>(syscall(SYS_fdatasync, descriptor));
}

int rename(const char* from, const char* to) noexcept {
  const int result = renameat(AT_FDCWD, from, AT_FDCWD, to);
  moesaic::runtime::SyncLog::Record("rename", to);
  return result;
}

}  // extern "C"
