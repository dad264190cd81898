// Computes grammar masks while the model runs. A mask usually takes microseconds to milliseconds, but that of
// a hostile grammar takes as long as it is allowed to, so nobody has to wait for a mask.
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
  std::shared_ptr<text::Grammar> grammar;  // the worker's until done
  std::vector<int32_t> drafts;             // as far as they may follow, each gets a mask of what follows it
  size_t words = 0;                        // of one mask: ceil(vocab_size / 32)
  bool slow = false;                       // computed at low priority, after all that are not

  std::vector<uint32_t> masks;  // [1 + drafts.size(), words]
  int made = 0;                 // leading masks that are filled
  Status status = OkStatus();   // of the first
  double seconds = 0;           // CPU time

  bool done() const { return finished.load(std::memory_order_acquire); }
  std::atomic<bool> finished = false, dropped = false, overdue = false;
};

/// Owner of a job: drops it when destroyed, so that a request that ends costs no further masks.
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
  /// Forgets a job that is done; one that is not is cancelled, and its grammar with it.
  void Drop();

 private:
  std::shared_ptr<MaskJob> job_;
};

/// One thread for masks that are usually quick, and one at low priority for sequences whose masks have been
/// slow. A slow mask on the quick thread does not hold up the others: Demote moves it out of their way. All
/// calls come from the engine thread.
class MaskWorker {
 public:
  /// `max_seconds`: CPU time that one job may take; it then fails.
  explicit MaskWorker(double max_seconds);
  ~MaskWorker();
  MaskWorker(const MaskWorker&) = delete;
  MaskWorker& operator=(const MaskWorker&) = delete;

  void Start(std::shared_ptr<MaskJob> job);
  /// Waits until all `jobs` are done, or until `end`.
  void WaitForAll(std::span<const std::shared_ptr<MaskJob>> jobs, std::chrono::steady_clock::time_point end);
  /// Waits until a job is done that was not at the last call of a wait, or until `end`.
  void WaitForAny(std::chrono::steady_clock::time_point end);
  /// Whether the quick thread has spent kSlowSeconds on `job`. If so, that thread ends with the job, at low
  /// priority, and another one takes its place.
  bool Demote(const MaskJob& job);
  /// Fails jobs that have taken too long.
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
    double started = 0;    // by it
    id_t id = 0;           // of the thread
    bool demoted = false, ended = false;
    std::thread thread;
  };
  void AddWorker(Queue& queue);
  void Loop(Worker& worker);

  const double max_seconds_;
  cpu_set_t cores_;   // that the threads may run on
  std::mutex mutex_;  // guards all below
  std::condition_variable work_, done_;
  int64_t completed_ = 0, seen_ = 0;
  bool stopping_ = false;
  Queue quick_, slow_;
  std::vector<std::unique_ptr<Worker>> workers_;
};

}  // namespace moesaic::engine
