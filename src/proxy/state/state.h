// State: requests, instances, counters and histograms in shared memory, with the operations on them.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "proxy/state/histogram.h"
#include "proxy/state/lease.h"
#include "proxy/state/records.h"
#include "proxy/state/zone.h"

namespace moesaic::proxy {

struct RequestSlot;
struct InstanceEntry;
struct LatencyModelLayout;

/// Result of Configure.
struct Configured {
  std::vector<int> added, kept, removed;  ///< instance ids
};

/// Totals for metrics.
struct Totals {
  std::array<uint64_t, kNumStages> in_stage{};  ///< requests that are in the stage now; kDone is always 0
  std::array<uint64_t, kNumStages> entered{};   ///< requests that ever entered it
  std::array<uint64_t, kNumOutcomes> outcomes{};
  uint64_t slots_used = 0, keys_used = 0, repairs = 0, reclaimed = 0;
  uint64_t prompt_tokens = 0, cached_tokens = 0, output_tokens = 0;
};

/// Circuit breaker: after `failures` consecutive failures an instance gets no request for `open`. Each
/// failure after that time doubles the next one, up to `max_open`.
struct BreakerOptions {
  uint32_t failures = 3;
  Nanos open = 1 * kSecond;
  Nanos max_open = 60 * kSecond;
};

/// Any process that has attached the zone may call all operations, from one thread at a time per process.
/// Each holds the zone's lock for about a microsecond at most, except where noted. If a process dies inside
/// an operation, the next operation repairs the counters from the slots.
class State {
 public:
  explicit State(Zone zone) : zone_(zone) {}

  const Zone& zone() const { return zone_; }
  Lease& lease() const;

  // --- Instances ---

  /// Makes the set of enabled instances equal to `configs`. Entries are found by URL and DP rank. Known
  /// entries keep their number, counters and index; entries that `configs` lacks are abandoned, and freed
  /// with their last reference. ResourceExhausted: the zone has too few entries.
  StatusOr<Configured> Configure(std::span<const InstanceConfig> configs, Nanos now);
  /// Returns ResourceExhausted if the zone has too few entries for Configure(`configs`).
  Status CheckCapacity(std::span<const InstanceConfig> configs) const;
  int max_instances() const;
  std::optional<InstanceRecord> Instance(int id) const;
  /// Returns the version of an entry in use, without a copy of the record.
  std::optional<InstanceVersion> Version(int id) const;
  std::vector<InstanceRecord> Instances() const;
  /// Returns the number of the instance with this URL and rank, or -1.
  int FindInstance(std::string_view url, uint32_t dp_rank) const;
  /// Sets kEnabled, kDraining or kDisabled.
  Status SetInstanceState(int id, InstanceState state);
  void SetHealthy(int id, bool healthy);
  /// Blocks of the engine's pool, as it reports them. Policies use them; they are no bound as
  /// InstanceCaps::kv_blocks is.
  void SetReportedBlocks(int id, uint64_t blocks);
  /// Passive health: results of requests. A failure may open the breaker.
  void RecordSuccess(int id);
  void RecordFailure(int id, Nanos now, const BreakerOptions& options = {});

  // --- Workers ---

  /// Registers the calling worker process; returns its number.
  StatusOr<int> RegisterWorker(int32_t pid);
  /// Ends a worker's registration. Its requests, if any, are finished as kLost.
  void UnregisterWorker(int worker, Nanos now);
  /// Frees slots and counters of workers that no longer exist; returns the number of freed requests.
  int ReclaimDeadWorkers(Nanos now);

  // --- Requests: called by the worker that owns the request ---

  /// Takes a slot; ResourceExhausted when none is free.
  StatusOr<RequestId> Begin(int worker, Nanos now);
  /// Stores the facts that tokenization yields. `keys` are the block keys of the prompt (index/keys.h). If
  /// the key memory is full, only the facts are stored. Must be called before Scheduler::Submit.
  bool SetPrompt(RequestId id, const PromptFacts& facts, std::span<const uint64_t> keys);
  /// Enters kTokenized, kPrefixMatched, kPrefillRunning or kDecodeRunning. Stages go forward only.
  bool Enter(RequestId id, Stage stage, Nanos now);
  /// Adds produced tokens to the request and its decode instance; stamps the first and the last token. Must
  /// be called when the tokens arrive: from the time between two calls the latency model learns the time of a
  /// decode step of the instance with its current requests and tokens.
  bool AddOutput(RequestId id, uint32_t tokens, Nanos now);
  /// Excludes the time until the next AddOutput from the latency model. Called after the answer was not read
  /// for a while because the client is slow.
  void SkipInterval(RequestId id);
  /// Replaces the number of prompt tokens, which may be an estimate, by the engine's report.
  bool SetPromptTokens(RequestId id, uint32_t tokens);
  /// Replaces the predicted number of cached tokens by the engine's report.
  bool SetCached(RequestId id, uint32_t tokens);
  /// Ends the request at any stage: releases its charges, its keys and its slot. Returns false when it has
  /// already ended.
  bool Finish(RequestId id, Outcome outcome, Nanos now);
  std::optional<RequestRecord> Request(RequestId id) const;
  /// Appends the requests of `worker` that Scheduler::Run placed or rejected since the last call. Request(id)
  /// has the decision: stage kPrefillScheduled or kDecodeScheduled, or `rejected`.
  void TakeScheduled(int worker, std::vector<RequestId>& scheduled);
  bool HasScheduled(int worker) const;
  /// Returns whether a request of any worker waits for the master.
  bool HasWaiting() const;

  // --- Observation ---

  Totals ReadTotals() const;
  /// Time that requests spent in a stage before they left it.
  const Histogram& stage_histogram(Stage stage) const;
  const Histogram& ttft() const;
  const Histogram& tpot() const;
  const Histogram& e2e() const;
  /// Calls `fn` for every used slot, on a copy taken under the lock. For /state pages and tests.
  void ForEachRequest(const std::function<void(const RequestRecord&)>& fn) const;
  /// Compares all counters with the sums over the slots. Internal describes the first difference.
  Status CheckInvariants() const;

 private:
  friend class Scheduler;
  friend class Locked;
  Zone zone_;
};

}  // namespace moesaic::proxy
