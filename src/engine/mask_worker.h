// Computes grammar masks while the model runs. A mask usually takes microseconds to milliseconds. One of a
// hostile grammar takes as long as allowed, so no step waits for a mask.
#pragma once

#include <sched.h>
#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.h"
#include "text/grammar.h"

namespace moesaic::engine {

/// The masks of one sequence's next token and of the tokens after its drafts. The engine thread reads the
/// results after done() is true.
struct MaskJob {
  std::shared_ptr<text::Grammar> grammar;  // owned by the worker until done
  std::vector<int32_t> drafts;             // each leading valid one gets a mask of the token after it
  size_t words = 0;                        // per mask: ceil(vocab_size / 32)
  bool slow = false;                       // computed at low priority, after all others

  std::vector<uint32_t> masks;  // [1 + drafts.size(), words]
  int made = 0;                 // leading masks that are filled
  Status status = OkStatus();   // of the first mask
  double seconds = 0;           // CPU time

  bool done() const { return finished.load(std::memory_order_acquire); }
  std::atomic<bool> finished = false, dropped = false, overdue = false;
};

/// Owns a job and drops it when destroyed, so that a request that ends causes no more work.
class MaskTicket {
 public:
  MaskTicket() = default;
  explicit MaskTicket(std::shared_ptr<MaskJob> job) : job_(std::move(job)) {}
  ~MaskTicket() { Drop(); }
  MaskTicket(MaskTicket&&) noexcept = default;
  MaskTicket& operator=(MaskTicket&& other) noexcept {
    std::swap(job_, other.job_);
    return *this;
  }

  explicit operator bool() const { return job_ != nullptr; }
  MaskJob* operator->() const { return job_.get(); }
  const std::shared_ptr<MaskJob>& job() const { return job_; }
  /// Releases a finished job, or cancels an unfinished one and its grammar.
  void Drop();

 private:
  std::shared_ptr<MaskJob> job_;
};

/// Two threads: one for masks that are usually quick, one at low priority for sequences with slow masks.
/// Demote moves a slow mask off the quick thread, so that it does not delay others. Called from the engine
/// thread only.
class MaskWorker {
 public:
  /// `max_seconds`: CPU time after which a job fails.
  explicit MaskWorker(double max_seconds);
  ~MaskWorker();
  MaskWorker(const MaskWorker&) = delete;
  MaskWorker& operator=(const MaskWorker&) = delete;

  void Start(std::shared_ptr<MaskJob> job);
  /// Waits until all `jobs` are done, or until `end`.
  void WaitForAll(std::span<const std::shared_ptr<MaskJob>> jobs, std::chrono::steady_clock::time_point end);
  /// Waits until a job completes that was not complete at the last wait, or until `end`.
  void WaitForAny(std::chrono::steady_clock::time_point end);
  /// Returns whether the quick thread has spent kSlowSeconds on `job`. If so, that thread finishes the job at
  /// low priority, and a new quick thread replaces it.
  bool Demote(const MaskJob& job);
  /// Fails jobs that exceed max_seconds.
  void CancelOverdue();

  /// CPU time from which a mask is slow. Masks of common schemas take up to some milliseconds over a
  /// vocabulary of 150,000 tokens.
  static constexpr double kSlowSeconds = 0.02;

 private:
  using Queue = std::deque<std::shared_ptr<MaskJob>>;
  struct Worker {
    Queue* queue;
    std::shared_ptr<MaskJob> running;
    clockid_t clock = {};  // CPU time of the thread
    double started = 0;    // by that clock
    id_t id = 0;           // of the thread
    bool demoted = false, ended = false;
    std::thread thread;
  };
  void AddWorker(Queue& queue);
  void Loop(Worker& worker);

  const double max_seconds_;
  cpu_set_t cores_;   // of the threads
  std::mutex mutex_;  // guards the members below
  std::condition_variable work_, done_;
  int64_t completed_ = 0, seen_ = 0;
  bool stopping_ = false;
  Queue quick_, slow_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace moesaic::engine
