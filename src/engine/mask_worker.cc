#include "engine/mask_worker.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace moesaic::engine {
namespace {

constexpr int kSlowNiceness = 10;

double CpuSeconds(clockid_t clock) {
  timespec time{};
  clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Only the first mask is needed: a failure after a draft costs no more than the draft.
void Compute(MaskJob& job) {
  job.masks.resize((1 + job.drafts.size()) * job.words);
  const std::span<uint32_t> masks = job.masks;
  job.status = job.grammar->ComputeMask(masks.first(job.words));
  if (!job.status.ok()) return;
  job.made = 1;
  if (job.drafts.empty()) return;
  StatusOr<text::Grammar> ahead = job.grammar->Fork();
  if (!ahead.ok()) return;
  for (size_t i = 0; i < job.drafts.size() && !job.dropped && !job.overdue; ++i) {
    const int32_t token = job.drafts[i];
    if ((masks[i * job.words + token / 32] >> (token % 32) & 1) == 0) return;
    if (!ahead->Commit(token).ok() || ahead->IsStopped()) return;
    if (!ahead->ComputeMask(masks.subspan((i + 1) * job.words, job.words)).ok()) return;
    ++job.made;
  }
}

}  // namespace

void MaskTicket::Drop() {
  if (job_ != nullptr && !job_->done()) {
    job_->dropped = true;
    job_->grammar->Cancel();
  }
  job_.reset();
}

// The cores are those of the thread that creates the engine: the engine's own thread is bound to one later.
MaskWorker::MaskWorker(double max_seconds) : max_seconds_(max_seconds) {
  CPU_ZERO(&cores_);  // stays empty if the machine has more hardware threads than the set
  pthread_getaffinity_np(pthread_self(), sizeof cores_, &cores_);
  const std::lock_guard lock(mutex_);
  AddWorker(quick_);
  AddWorker(slow_);
}

MaskWorker::~MaskWorker() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    for (const auto& worker : workers_) {
      if (worker->running != nullptr) worker->running->grammar->Cancel();
    }
  }
  work_.notify_all();
  for (const auto& worker : workers_) worker->thread.join();
}

void MaskWorker::AddWorker(Queue& queue) {
  Worker& worker = *workers_.emplace_back(std::make_unique<Worker>());
  worker.queue = &queue;
  worker.thread = std::thread([this, &worker] { Loop(worker); });
}

void MaskWorker::Start(std::shared_ptr<MaskJob> job) {
  const std::lock_guard lock(mutex_);
  (job->slow ? slow_ : quick_).push_back(std::move(job));
  work_.notify_all();
}

void MaskWorker::WaitForAll(std::span<const std::shared_ptr<MaskJob>> jobs,
                            std::chrono::steady_clock::time_point end) {
  std::unique_lock lock(mutex_);
  done_.wait_until(lock, end,
                   [&] { return std::ranges::all_of(jobs, [](auto& job) { return job->done(); }); });
  seen_ = completed_;
}

void MaskWorker::WaitForAny(std::chrono::steady_clock::time_point end) {
  std::unique_lock lock(mutex_);
  done_.wait_until(lock, end, [this] { return completed_ != seen_; });
  seen_ = completed_;
}

bool MaskWorker::Demote(const MaskJob& job) {
  const std::lock_guard lock(mutex_);
  std::erase_if(workers_, [](const auto& worker) {
    if (worker->ended) worker->thread.join();
    return worker->ended;
  });
  for (const auto& worker : workers_) {
    if (worker->running.get() != &job || worker->queue != &quick_ || worker->demoted) continue;
    if (CpuSeconds(worker->clock) - worker->started < kSlowSeconds) return false;
    worker->demoted = true;
    setpriority(PRIO_PROCESS, worker->id, kSlowNiceness);
    AddWorker(quick_);
    return true;
  }
  return false;
}

void MaskWorker::CancelOverdue() {
  const std::lock_guard lock(mutex_);
  for (const auto& worker : workers_) {
    if (worker->running == nullptr || CpuSeconds(worker->clock) - worker->started <= max_seconds_) continue;
    worker->running->overdue = true;
    worker->running->grammar->Cancel();
  }
}

void MaskWorker::Loop(Worker& worker) {
  if (CPU_COUNT(&cores_) > 0) pthread_setaffinity_np(pthread_self(), sizeof cores_, &cores_);
  std::unique_lock lock(mutex_);
  pthread_getcpuclockid(pthread_self(), &worker.clock);
  worker.id = static_cast<id_t>(syscall(SYS_gettid));
  if (worker.queue == &slow_) setpriority(PRIO_PROCESS, worker.id, kSlowNiceness);
  while (!worker.demoted) {
    work_.wait(lock, [&] { return stopping_ || !worker.queue->empty(); });
    if (stopping_) return;
    const std::shared_ptr<MaskJob> job = std::move(worker.queue->front());
    worker.queue->pop_front();
    worker.started = CpuSeconds(worker.clock);
    worker.running = job;
    lock.unlock();
    if (!job->dropped) Compute(*job);
    lock.lock();
    worker.running = nullptr;
    job->seconds = CpuSeconds(worker.clock) - worker.started;
    if (job->overdue && !job->status.ok()) {
      job->status = ResourceExhausted(
          "the grammar costs too much: one mask took more than {:.1f} s of CPU time", max_seconds_);
    }
    job->finished.store(true, std::memory_order_release);
    ++completed_;
    done_.notify_all();
  }
  worker.ended = true;
}

}  // namespace moesaic::engine
