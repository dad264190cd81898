// Replays a trace in virtual time: the scheduler, state and index of the proxy over mock engines.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/status.h"
#include "proxy/mock/engine_options.h"
#include "proxy/schedule/policy.h"
#include "proxy/schedule/scheduler.h"
#include "proxy/simulate/trace.h"

namespace moesaic::proxy {

struct SimulationOptions {
  std::string policy = "moesaic";
  int engines = 0;  ///< aggregated instances; 0: `prefill` and `decode` instances instead
  int prefill = 4, decode = 4;
  MockEngineOptions engine;        ///< options of every instance; the block size is that of the trace
  uint64_t kv_tokens = 1'000'000;  ///< capacity of an instance's block pool
  PolicyOptions policy_options;    ///< SLOs, seed
  SchedulerOptions scheduler;
  Nanos event_delay = 10 * kMillisecond;  ///< time from a change of an engine's cache to the index
  double prior_error =
      1.5;  ///< factor on the true coefficients in the scheduler's first model: it has to learn
};

struct SimulationResult {
  std::string policy;
  uint64_t requests = 0, completed = 0, rejected = 0, failed = 0;
  uint64_t good = 0;        ///< completed within both SLOs
  double offered_rate = 0;  ///< requests/s of the trace
  double goodput = 0;       ///< good requests/s over the span of the arrivals
  double ttft_ms[3] = {};   ///< p50, p90, p99
  double tpot_ms[3] = {};
  double hit_rate = 0;     ///< prompt tokens that were not computed
  double imbalance = 0;    ///< busiest prefill (or aggregated) instance over the mean
  double utilization = 0;  ///< mean busy share of the prefill (or aggregated) instances
  Nanos longest_wait = 0;  ///< in the proxy's queue
  uint64_t prefill_skipped = 0, preemptions = 0;
  Nanos virtual_time = 0;
};

/// Returns a bound of the goodput of every policy, in requests/s: the largest number of requests that meet
/// the TTFT target if all prefill engines were one engine of their speed together, all reusable tokens were
/// reused and all steps were full. (Kise, Ibaraki and Mine, "A solvable case of the one-machine scheduling
/// problem with ready and due times", Operations Research 26(1), 1978: deadlines come in the order of
/// arrivals.)
double GoodputBound(const Trace& trace, const SimulationOptions& options);

/// Goodput in requests/s if the prefill engines served one queue in the order of arrivals, one prompt at a
/// time, and shared one cache that evicts nothing. No bound: another order, or batches, can be better.
double CommonCacheGoodput(const Trace& trace, const SimulationOptions& options);

/// `progress` is called repeatedly with the number of requests that have ended; returning false cancels the
/// run.
StatusOr<SimulationResult> Simulate(const Trace& trace, const SimulationOptions& options,
                                    const std::function<bool(uint64_t done)>& progress = {});

}  // namespace moesaic::proxy
