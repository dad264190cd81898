#include "proxy/simulate/simulation.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <limits>
#include <unordered_map>

#include "base/round.h"
#include "proxy/mock/engine.h"
#include "proxy/state/layout.h"

namespace moesaic::proxy {
namespace {

// Anonymous memory for a zone.
class Mapping {
 public:
  static StatusOr<std::unique_ptr<Mapping>> Create(size_t bytes) {
    void* const memory =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return ResourceExhausted("no memory for a zone of {} bytes", bytes);
    return std::unique_ptr<Mapping>(new Mapping(memory, bytes));
  }
  ~Mapping() { munmap(memory_, bytes_); }
  void* memory() const { return memory_; }
  size_t bytes() const { return bytes_; }

 private:
  Mapping(void* memory, size_t bytes) : memory_(memory), bytes_(bytes) {}
  void* memory_;
  size_t bytes_;
};

struct Delivery {
  Nanos time;
  int instance;
  std::vector<KvEvent> events;
};

struct Live {
  size_t index;  // in the trace
  RequestId id;
  int prefill = -1, decode = -1;
  bool skipped = false;
};

struct Outcomes {
  std::vector<double> ttft_ms, tpot_ms;
};

double Percentile(std::vector<double>& values, double share) {
  if (values.empty()) return 0;
  const size_t at =
      std::min(values.size() - 1, static_cast<size_t>(share * static_cast<double>(values.size())));
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(at), values.end());
  return values[at];
}

class Replay {
 public:
  Replay(const Trace& trace, const SimulationOptions& options, Zone zone, std::unique_ptr<Policy> policy)
      : trace_(trace),
        options_(options),
        state_(zone),
        index_(zone),
        scheduler_(state_, index_, std::move(policy), options.scheduler) {}

  Status Start() {
    const bool aggregated = options_.engines > 0;
    const int count = aggregated ? options_.engines : options_.prefill + options_.decode;
    std::vector<InstanceConfig> configs;
    for (int i = 0; i < count; ++i) {
      MockEngineOptions engine = options_.engine;
      engine.role = aggregated ? Role::kBoth : i < options_.prefill ? Role::kPrefill : Role::kDecode;
      engine.block_size = trace_.block_size;
      engine.num_blocks = static_cast<uint32_t>(options_.kv_tokens / trace_.block_size);
      engine.seed += static_cast<uint64_t>(i);
      engines_.emplace_back(engine);
      configs.push_back({.url = fmt::format("sim://{}", i),
                         .role = engine.role,
                         .block_size = trace_.block_size,
                         .caps = {.prefill_requests = 64,
                                  .prefill_tokens = 0,
                                  .decode_requests = engine.max_sequences,
                                  .decode_tokens = 0,
                                  .kv_blocks = engine.num_blocks}});
    }
    RETURN_IF_ERROR(state_.Configure(configs, 1).status());
    // The engines announce their blocks from the beginning.
    const StateView view(state_.zone());
    for (int i = 0; i < count; ++i)
      view.instance(i).index_state.store(static_cast<uint8_t>(IndexState::kExact));
    ASSIGN_OR_RETURN(worker_, state_.RegisterWorker(getpid()));
    const auto lease = state_.lease().Acquire(getpid(), 1);
    if (!lease) return absl::InternalError("the lease of a new zone is taken");
    lease_ = *lease;
    LatencyCoefficients prior = options_.engine.time;
    for (double* value : {&prior.base, &prior.per_token, &prior.per_pair, &prior.step_base,
                          &prior.per_sequence, &prior.per_kv_token})
      *value *= options_.prior_error;
    scheduler_.SetPrior(prior);
    first_token_.resize(trace_.requests.size());
    return OkStatus();
  }

  Status Run(const std::function<bool(uint64_t)>& progress, SimulationResult& result) {
    const Nanos start = kSecond;  // stamps of 0 mean "not entered"
    size_t next = 0;
    uint64_t reported = 0;
    for (;;) {
      Nanos now = next < trace_.requests.size() ? start + trace_.requests[next].arrival : kNever;
      for (const MockEngine& engine : engines_) now = std::min(now, engine.NextEvent());
      if (!deliveries_.empty()) now = std::min(now, deliveries_.front().time);
      if (next_run_ != 0) now = std::min(now, std::max(next_run_, now_ + 1));
      if (now == kNever) break;
      now_ = now;
      bool changed = next_run_ != 0 && next_run_ <= now;
      while (!deliveries_.empty() && deliveries_.front().time <= now) {
        Apply(deliveries_.front());
        deliveries_.pop_front();
      }
      for (size_t e = 0; e < engines_.size(); ++e) {
        if (engines_[e].NextEvent() > now) continue;
        engines_[e].Advance(now);
        changed |= HandleEngine(static_cast<int>(e), result);
      }
      for (; next < trace_.requests.size() && start + trace_.requests[next].arrival <= now; ++next) {
        RETURN_IF_ERROR(Arrive(next, result));
        changed = true;
      }
      if (changed) RETURN_IF_ERROR(Schedule(result));
      const uint64_t done = result.completed + result.rejected + result.failed;
      if (progress && done - reported >= 64) {
        reported = done;
        if (!progress(done)) return Cancelled("the simulation was interrupted");
      }
    }
    if (!live_.empty())
      return absl::InternalError(fmt::format("{} requests were never served", live_.size()));
    RETURN_IF_ERROR(state_.CheckInvariants());
    if (state_.ReadTotals().slots_used != 0)
      return absl::InternalError("request slots are in use after the end");
    Finish(result, start);
    return OkStatus();
  }

 private:
  void Apply(const Delivery& delivery) {
    for (const KvEvent& event : delivery.events) {
      for (const uint64_t key : event.block_hashes) {
        if (event.type == KvEvent::Type::kStored) {
          index_.Add(delivery.instance, Tier::kDevice, key);
        } else {
          index_.Remove(delivery.instance, Tier::kDevice, key);
        }
      }
    }
  }

  Status Arrive(size_t index, SimulationResult& result) {
    const TraceRequest& request = trace_.requests[index];
    ASSIGN_OR_RETURN(const RequestId id, state_.Begin(worker_, now_));
    PromptFacts facts;
    facts.prompt_tokens = request.prompt_tokens;
    facts.session = request.session;
    facts.mode = options_.engines > 0 ? Mode::kAggregated : Mode::kSequential;
    facts.block_size = request.keys.empty() ? 0 : trace_.block_size;
    state_.SetPrompt(id, facts, request.keys);
    state_.Enter(id, Stage::kTokenized, now_);
    state_.Enter(id, Stage::kPrefixMatched, now_);
    if (scheduler_.Submit(id, now_).verdict != Admission::Verdict::kQueued) {
      state_.Finish(id, Outcome::kRejected, now_);
      ++result.rejected;
      return OkStatus();
    }
    live_.emplace(id.slot, Live{.index = index, .id = id});
    return OkStatus();
  }

  MockRequest RequestFor(const Live& live) const {
    const TraceRequest& request = trace_.requests[live.index];
    MockRequest mock;
    mock.id = live.index;
    mock.prompt_tokens = request.prompt_tokens;
    mock.output_tokens = request.output_tokens;
    mock.keys = request.keys;
    mock.output_seed = live.index;
    return mock;
  }

  Status Schedule(SimulationResult& result) {
    state_.lease().Renew(lease_, now_);
    const RunResult run = scheduler_.Run(lease_, now_);
    next_run_ = run.next_run;
    scheduled_.clear();
    state_.TakeScheduled(worker_, scheduled_);
    for (const RequestId id : scheduled_) {
      Live& live = live_.at(id.slot);
      const RequestRecord record = *state_.Request(id);
      MockRequest mock = RequestFor(live);
      if (record.rejected) {
        state_.Finish(id, Outcome::kRejected, now_);
        live_.erase(id.slot);
        ++result.rejected;
        continue;
      }
      if (record.stage == Stage::kPrefillScheduled || record.prefill_skipped) {
        result.longest_wait =
            std::max(result.longest_wait, now_ - record.entered[static_cast<size_t>(Stage::kPrefillWaiting)]);
      }
      int target = record.prefill_instance;
      if (record.stage == Stage::kPrefillScheduled) {
        live.prefill = target;
        mock.prefill_only = record.facts.mode == Mode::kSequential;
        state_.Enter(id, Stage::kPrefillRunning, now_);
      } else {
        target = live.decode = record.decode_instance;
        live.skipped = record.prefill_skipped;
        result.prefill_skipped += live.skipped;
        mock.remote_prefill = !live.skipped;
        mock.remote_ready = now_;
        state_.Enter(id, Stage::kDecodeRunning, now_);
      }
      RETURN_IF_ERROR(engines_[target].Submit(std::move(mock), now_));
      by_index_[live.index] = id.slot;
      HandleEngine(target, result);
    }
    return OkStatus();
  }

  // True when something changed that the scheduler should know.
  bool HandleEngine(int e, SimulationResult& result) {
    MockEngine& engine = engines_[e];
    messages_.clear();
    engine.TakeMessages(messages_);
    for (MockMessage& message : messages_)
      deliveries_.push_back(
          {.time = now_ + options_.event_delay, .instance = e, .events = std::move(message.events)});
    std::vector<MockOutput> outputs;
    engine.TakeOutputs(outputs);
    for (const MockOutput& output : outputs) HandleOutput(e, output, result);
    return !outputs.empty();
  }

  void HandleOutput(int e, const MockOutput& output, SimulationResult& result) {
    const auto found = by_index_.find(output.id);
    if (found == by_index_.end()) return;
    Live& live = live_.at(found->second);
    const TraceRequest& request = trace_.requests[live.index];
    if (output.kind == MockOutput::Kind::kTransferred) {
      engines_[live.prefill].ReleaseRemote(output.id, now_);
      return;
    }
    const bool from_prefill = e == live.prefill && options_.engines == 0;
    if (e == live.prefill && output.tokens == 1) {
      state_.SetCached(live.id, output.cached_tokens);
      cached_ += output.cached_tokens;
      scheduler_.PrefillDone(live.id, output.time);
      if (from_prefill) return;
    }
    if (live.skipped && output.tokens == 1) cached_ += output.cached_tokens;
    if (output.tokens == 1) first_token_[live.index] = output.time;
    state_.AddOutput(live.id, 1, output.time);
    if (output.kind != MockOutput::Kind::kFinished) return;
    const double ttft =
        static_cast<double>(first_token_[live.index] - state_.Request(live.id)->entered[0]) / kMillisecond;
    const double tpot = request.output_tokens > 1
                            ? static_cast<double>(output.time - first_token_[live.index]) / kMillisecond /
                                  (request.output_tokens - 1)
                            : 0;
    outcomes_.ttft_ms.push_back(ttft);
    if (request.output_tokens > 1) outcomes_.tpot_ms.push_back(tpot);
    const PolicyOptions& slo = options_.policy_options;
    const bool good = (slo.slo_ttft == 0 || ttft * kMillisecond <= static_cast<double>(slo.slo_ttft)) &&
                      (slo.slo_tpot == 0 || tpot * kMillisecond <= static_cast<double>(slo.slo_tpot));
    result.good += good;
    ++result.completed;
    state_.Finish(live.id, Outcome::kCompleted, output.time);
    live_.erase(found->second);
    by_index_.erase(found);
  }

  void Finish(SimulationResult& result, Nanos start) {
    result.requests = trace_.requests.size();
    const double span = std::max(static_cast<double>(trace_.span()) / kSecond, 1e-3);
    result.offered_rate = static_cast<double>(result.requests) / span;
    result.goodput = static_cast<double>(result.good) / span;
    constexpr double kShares[] = {0.5, 0.9, 0.99};
    for (int i = 0; i < 3; ++i) {
      result.ttft_ms[i] = Percentile(outcomes_.ttft_ms, kShares[i]);
      result.tpot_ms[i] = Percentile(outcomes_.tpot_ms, kShares[i]);
    }
    result.hit_rate = static_cast<double>(cached_) / static_cast<double>(trace_.prompt_tokens());
    result.virtual_time = now_ - start;
    Nanos max_busy = 0, sum = 0;
    int count = 0;
    for (const MockEngine& engine : engines_) {
      result.preemptions += engine.stats().preemptions;
      if (engine.options().role == Role::kDecode) continue;
      max_busy = std::max(max_busy, engine.stats().busy);
      sum += engine.stats().busy;
      ++count;
    }
    if (sum > 0) result.imbalance = static_cast<double>(max_busy) * count / static_cast<double>(sum);
    if (result.virtual_time > 0)
      result.utilization = static_cast<double>(sum) / count / static_cast<double>(result.virtual_time);
  }

  const Trace& trace_;
  const SimulationOptions& options_;
  State state_;
  BlockIndex index_;
  Scheduler scheduler_;
  std::vector<MockEngine> engines_;
  LeaseToken lease_;
  int worker_ = 0;
  Nanos now_ = 0, next_run_ = 0;
  std::deque<Delivery> deliveries_;
  std::unordered_map<uint32_t, Live> live_;  // by slot
  std::unordered_map<uint64_t, uint32_t>
      by_index_;  // index in the trace, of requests that engines have, to slot
  std::vector<Nanos> first_token_;
  std::vector<MockMessage> messages_;
  std::vector<RequestId> scheduled_;
  Outcomes outcomes_;
  uint64_t cached_ = 0;
};

}  // namespace

double GoodputBound(const Trace& trace, const SimulationOptions& options) {
  const LatencyCoefficients& time = options.engine.time;
  const std::vector<uint32_t> reusable = trace.ReusableTokens();
  const int engines = options.engines > 0 ? options.engines : options.prefill;
  const auto target = static_cast<double>(options.policy_options.slo_ttft);
  const double span = std::max(static_cast<double>(trace.span()), 1e6);
  if (target == 0) return static_cast<double>(trace.requests.size()) / span * kSecond;
  struct Job {
    double arrival, work, after;  // after: of this job and the later ones
  };
  std::vector<Job> busy;  // jobs on time since the engine was idle last, in order of arrival
  size_t on_time = 0;
  double end = 0;              // of the last job
  std::vector<double> latest;  // end of the last job as the first i jobs determine it
  for (size_t i = 0; i < trace.requests.size(); ++i) {
    const TraceRequest& request = trace.requests[i];
    const double cached = reusable[i], fresh = request.prompt_tokens - cached;
    const double base = time.base * std::min(1.0, fresh / options.engine.max_batch_tokens);
    double work = time.PrefillNanos(fresh, cached) - time.base + base;
    if (work > target) continue;
    // A decode engine computes short rests itself.
    if (options.engines == 0 && fresh <= options.scheduler.skip_prefill_tokens) work = 0;
    const auto arrival = static_cast<double>(request.arrival);
    if (arrival >= end) busy.clear();
    busy.push_back({.arrival = arrival, .work = work / engines, .after = 0});
    end = std::max(end, arrival) + busy.back().work;
    ++on_time;
    if (end <= arrival + target) continue;
    // Late: without the job whose absence ends the others first, the rest is on time.
    latest.assign(busy.size() + 1, 0);
    double after = 0;
    for (size_t j = busy.size(); j-- > 0;) busy[j].after = after += busy[j].work;
    for (size_t j = 0; j < busy.size(); ++j)
      latest[j + 1] = std::max(latest[j], busy[j].arrival + busy[j].after);
    size_t removed = 0;
    double behind = 0, earliest = std::numeric_limits<double>::infinity();
    for (size_t j = busy.size(); j-- > 0;) {
      // Jobs before j end earlier by its work; later ones may have to wait for their own arrival.
      const double without = std::max(latest[j] - busy[j].work, behind);
      if (without < earliest) {
        earliest = without;
        removed = j;
      }
      behind = std::max(behind, busy[j].arrival + busy[j].after);
    }
    busy.erase(busy.begin() + static_cast<ptrdiff_t>(removed));
    end = earliest;
    --on_time;
  }
  return static_cast<double>(on_time) / span * kSecond;
}

double CommonCacheGoodput(const Trace& trace, const SimulationOptions& options) {
  const std::vector<uint32_t> reusable = trace.ReusableTokens();
  const auto target = static_cast<double>(options.policy_options.slo_ttft);
  const double span = std::max(static_cast<double>(trace.span()), 1e6);
  std::vector<double> free(static_cast<size_t>(options.engines > 0 ? options.engines : options.prefill));
  size_t on_time = 0;
  for (size_t i = 0; i < trace.requests.size(); ++i) {
    const TraceRequest& request = trace.requests[i];
    const double cached = reusable[i], fresh = request.prompt_tokens - cached;
    const auto arrival = static_cast<double>(request.arrival);
    double& engine = *std::min_element(free.begin(), free.end());
    engine = std::max(engine, arrival) + options.engine.time.PrefillNanos(fresh, cached);
    if (target == 0 || engine <= arrival + target) ++on_time;
  }
  return static_cast<double>(on_time) / span * kSecond;
}

StatusOr<SimulationResult> Simulate(const Trace& trace, const SimulationOptions& options,
                                    const std::function<bool(uint64_t)>& progress) {
  const int count = options.engines > 0 ? options.engines : options.prefill + options.decode;
  if (count <= 0 || count > kMaxInstances ||
      (options.engines == 0 && (options.prefill <= 0 || options.decode <= 0)))
    return InvalidArgument("a simulation has 1 to {} instances, with P/D at least one of each kind, not {}",
                           kMaxInstances, count);
  uint64_t keys = 0, longest = 0;
  for (const TraceRequest& request : trace.requests) {
    keys += request.keys.size();
    longest = std::max<uint64_t>(longest, uint64_t{request.prompt_tokens} + request.output_tokens);
  }
  if (longest > options.kv_tokens) {
    return InvalidArgument("a request of the trace has {} tokens, the KV cache of an instance holds {}",
                           longest, options.kv_tokens);
  }
  ZoneOptions zone_options;
  zone_options.max_instances = static_cast<uint32_t>(count);
  zone_options.max_requests = static_cast<uint32_t>(std::min<size_t>(trace.requests.size() + 1, 1 << 17));
  zone_options.max_workers = 1;
  zone_options.request_keys = std::max<uint64_t>(keys * 2, 1 << 16);
  const uint64_t resident = options.kv_tokens / trace.block_size * static_cast<uint64_t>(count);
  zone_options.index_blocks = std::max<uint64_t>(std::min(resident, keys) * 2, 1 << 14);
  zone_options.engine_blocks = 64;
  zone_options.shared_blocks = std::max<uint64_t>(zone_options.index_blocks / 4, 1 << 10);
  zone_options.speculative_blocks = std::max<uint64_t>(std::min<uint64_t>(keys, 1 << 20), 1 << 10);
  ASSIGN_OR_RETURN(const auto mapping, Mapping::Create(Zone::Bytes(zone_options)));
  ASSIGN_OR_RETURN(const Zone zone, Zone::Create(mapping->memory(), mapping->bytes(), zone_options));
  ASSIGN_OR_RETURN(auto policy, MakePolicy(options.policy, options.policy_options));
  Replay replay(trace, options, zone, std::move(policy));
  RETURN_IF_ERROR(replay.Start());
  SimulationResult result;
  result.policy = options.policy;
  RETURN_IF_ERROR(replay.Run(progress, result));
  return result;
}

}  // namespace moesaic::proxy
