#include "engine/mask_worker.h"

#include <utility>

namespace moesaic::engine {

MaskWorker::MaskWorker() : thread_([this] { Loop(); }) {}

MaskWorker::~MaskWorker() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void MaskWorker::Start(std::vector<Job> jobs) {
  if (jobs.empty()) return;
  const std::lock_guard lock(mutex_);
  jobs_ = std::move(jobs);
  working_ = true;
  changed_.notify_all();
}

std::vector<MaskWorker::Job> MaskWorker::Wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !working_; });
  return std::exchange(jobs_, {});
}

void MaskWorker::Loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return working_ || stopping_; });
    if (stopping_) return;
    std::vector<Job> jobs = std::exchange(jobs_, {});
    lock.unlock();
    for (Job& job : jobs) job.status = job.grammar->ComputeMask(job.mask);
    lock.lock();
    jobs_ = std::move(jobs);
    working_ = false;
    changed_.notify_all();
  }
}

}  // namespace moesaic::engine
