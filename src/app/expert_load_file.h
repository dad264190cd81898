// The file of --record-expert-load.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "engine/expert_load.h"

namespace moesaic::app {

/// Writes the latest loads by a thread of its own, so that steps do not wait for the disk. The file is always
/// whole. A failed write is counted; it is logged if the one before succeeded.
class ExpertLoadFile {
 public:
  explicit ExpertLoadFile(std::string path);
  ~ExpertLoadFile();  ///< Writes the last loads.
  ExpertLoadFile(const ExpertLoadFile&) = delete;
  ExpertLoadFile& operator=(const ExpertLoadFile&) = delete;

  /// Any thread.
  void Write(std::shared_ptr<const engine::ExpertLoadStats> stats);
  /// Number of failed writes. Any thread.
  int64_t write_errors() const { return write_errors_; }

 private:
  void Run();

  const std::string path_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::shared_ptr<const engine::ExpertLoadStats> next_;  // null: written
  bool ending_ = false;
  std::atomic<int64_t> write_errors_ = 0;
  std::thread thread_;  // last: it uses all of the above
};

}  // namespace moesaic::app
