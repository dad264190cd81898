// Scheduler: queues, order, admission and placement over the shared state. Every worker has one; the holder
// of the lease runs it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "proxy/index/block_index.h"
#include "proxy/schedule/policy.h"
#include "proxy/state/state.h"

namespace moesaic::proxy {

struct SchedulerOptions {
  /// A request that waited this long is placed before all younger ones, on any instance with a free slot.
  Nanos starvation_bound = 10 * kSecond;
  uint32_t queue_limit = 4096;  ///< maximum waiting requests; Submit rejects others
  Nanos queue_time_limit = 0;  ///< maximum predicted waiting time; Submit rejects other requests; 0: no limit
  /// P may be skipped when at most this many prompt tokens are uncached on the chosen D.
  uint32_t skip_prefill_tokens = 256;
  Nanos speculative_ttl = 2 * kSecond;
  uint32_t max_retries = 2;
  TenantLimit tenant;
  uint32_t placements_per_run = 256;
};

/// Answer to Submit.
struct Admission {
  enum class Verdict : uint8_t { kQueued, kQueueFull, kTooSlow, kRateLimited, kStale };
  Verdict verdict = Verdict::kQueued;
  Nanos retry_after = 0;
};

struct RunResult {
  uint32_t placed_prefill = 0, placed_decode = 0, rejected = 0;
  uint32_t waiting_prefill = 0, waiting_decode = 0;  ///< still in the queues
  /// Time at which Run must be called again even without an event; 0: none.
  Nanos next_run = 0;
  /// Time from which Run drops expected blocks that no event confirmed; 0: no block is expected.
  Nanos next_expiry = 0;
  /// Workers (numbers of RegisterWorker) that have new entries in State::TakeScheduled.
  std::vector<int> wake;
  bool lost_lease = false;  ///< another process is the master; Run stopped when it noticed
};

/// The master calls Run after each Submit, PrefillDone, Requeue and State::Finish (a slot became free) of any
/// worker, and at next_run. A worker that is not the master wakes the master after one of these calls.
class Scheduler {
 public:
  Scheduler(State state, BlockIndex index, std::unique_ptr<Policy> policy, const SchedulerOptions& options);
  ~Scheduler();
  Scheduler(Scheduler&&) noexcept;

  // --- Called by the worker that owns the request ---

  /// Puts a tokenized request into the prefill queue. `limit`: of its tenant; null: SchedulerOptions::tenant.
  Admission Submit(RequestId id, Nanos now, const TenantLimit* limit = nullptr);
  /// The prefill instance has answered. Releases its charge, teaches the latency model, and moves the request
  /// on: kAggregated to kDecodeRunning on the same instance, kSequential to kDecodeWaiting, kParallel to
  /// kDecodeRunning.
  bool PrefillDone(RequestId id, Nanos now);
  /// Instance `failed` did not serve the request, and no byte was sent to the client: back into the queue
  /// that chose it. The request avoids that instance while another one may take it; -1: it avoids none.
  /// `keeps_prefill`: the blocks of the prefill instance are still valid, so that a sequential request needs
  /// another decode instance only. False when the retries are used up: finish the request as kFailed.
  bool Requeue(RequestId id, int failed, bool keeps_prefill, Nanos now);

  // --- Called by the holder of the lease ---

  RunResult Run(LeaseToken lease, Nanos now);

  /// Finds the current longest prefixes of a request's keys. Used by Run; public for access logs.
  bool Match(RequestId id, MatchResult& result) const;
  const Policy& policy() const;
  /// Returns the coefficients of a model class.
  LatencyCoefficients Model(uint32_t model_class) const;
  /// Replaces the start values of all classes that have no samples.
  void SetPrior(const LatencyCoefficients& prior);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::proxy
