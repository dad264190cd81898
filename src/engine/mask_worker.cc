#include "engine/mask_worker.h"

#include <utility>

namespace moesaic::engine {
namespace {

// Only the first mask is needed: what fails behind a draft costs no more than the draft.
void Compute(MaskWorker::Job& job) {
  const size_t words = job.masks.size() / (1 + job.drafts.size());
  job.status = job.grammar->ComputeMask(job.masks.first(words));
  if (!job.status.ok()) return;
  job.made = 1;
  if (job.drafts.empty()) return;
  StatusOr<text::Grammar> ahead = job.grammar->Fork();
  if (!ahead.ok()) return;
  for (size_t i = 0; i < job.drafts.size(); ++i) {
    const int32_t token = job.drafts[i];
    if ((job.masks[i * words + token / 32] >> (token % 32) & 1) == 0) return;
    if (!ahead->Commit(token).ok() || ahead->IsStopped()) return;
    if (!ahead->ComputeMask(job.masks.subspan((i + 1) * words, words)).ok()) return;
    ++job.made;
  }
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
    for (Job& job : jobs) Compute(job);
    lock.lock();
    jobs_ = std::move(jobs);
    working_ = false;
    changed_.notify_all();
  }
}

}  // namespace moesaic::engine
