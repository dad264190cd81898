#include "app/expert_load_file.h"

#include <spdlog/spdlog.h>

#include <utility>

#include "runtime/atomic_file.h"

namespace moesaic::app {

ExpertLoadFile::ExpertLoadFile(std::string path) : path_(std::move(path)), thread_([this] { Run(); }) {}

ExpertLoadFile::~ExpertLoadFile() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  wake_.notify_one();
  thread_.join();
}

void ExpertLoadFile::Write(std::shared_ptr<const engine::ExpertLoadStats> stats) {
  {
    const std::lock_guard lock(mutex_);
    next_ = std::move(stats);
  }
  wake_.notify_one();
}

void ExpertLoadFile::Run() {
  bool failed = false;
  for (;;) {
    std::shared_ptr<const engine::ExpertLoadStats> stats;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return ending_ || next_ != nullptr; });
      stats = std::exchange(next_, nullptr);
    }
    if (stats == nullptr) return;  // ending
    const Status written = runtime::WriteFileAtomically(path_, engine::ToJson(*stats));
    if (!written.ok()) {
      ++write_errors_;
      if (!failed) spdlog::error("expert loads are not recorded: {}", Message(written));
    }
    failed = !written.ok();
  }
}

}  // namespace moesaic::app
