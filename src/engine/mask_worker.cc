#include "engine/mask_worker.h"

#include <utility>

namespace moesaic::engine {
namespace {

// The masks behind a draft that may not follow are left as they are: nothing is drawn there.
Status Compute(const MaskWorker::Job& job) {
  const size_t words = job.masks.size() / (1 + job.drafts.size());
  RETURN_IF_ERROR(job.grammar->ComputeMask(job.masks.first(words)));
  if (job.drafts.empty()) return OkStatus();
  ASSIGN_OR_RETURN(text::Grammar ahead, job.grammar->Fork());
  for (size_t i = 0; i < job.drafts.size(); ++i) {
    const int32_t token = job.drafts[i];
    if ((job.masks[i * words + token / 32] >> (token % 32) & 1) == 0) return OkStatus();
    RETURN_IF_ERROR(ahead.Commit(token));
    if (ahead.IsStopped()) return OkStatus();
    RETURN_IF_ERROR(ahead.ComputeMask(job.masks.subspan((i + 1) * words, words)));
  }
  return OkStatus();
}

}  // namespace

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
    for (Job& job : jobs) job.status = Compute(job);
    lock.lock();
    jobs_ = std::move(jobs);
    working_ = false;
    changed_.notify_all();
  }
}

}  // namespace moesaic::engine
