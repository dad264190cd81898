// Policy: chooses instances for requests. Policy `moesaic` and those of other routers share this interface.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "proxy/schedule/latency_model.h"
#include "proxy/state/records.h"

namespace moesaic::proxy {

/// An instance as a policy sees it. Only eligible instances are shown: enabled, healthy, breaker closed, not
/// excluded for the request.
struct InstanceView {
  int id = -1;
  Role role = Role::kBoth;
  uint32_t group = 0, pod = 0, dp_rank = 0, block_size = 16;
  uint32_t batch_tokens = 8192;
  double weight = 1;
  InstanceCaps caps;
  uint64_t kv_blocks = 0;  ///< size of the engine's pool, from its caps or its metrics; 0: unknown
  InstanceLoad load;
  IndexState index_state = IndexState::kNone;
  Nanos busy_since = 0;  ///< start of the prefill that runs; 0: idle
  Nanos last_scheduled = 0, last_prefill_done = 0;
  uint64_t prefills = 0;  ///< requests it ever got
  const LatencyCoefficients* model = nullptr;
  Nanos pod_wait = 0;  ///< until the step ends that another rank of its pod computes: they begin together
  Nanos reserved_work = 0;  ///< of older requests that wait in the queue for this instance
  // Facts about the request at hand:
  uint32_t matched_tokens = 0;         ///< leading prompt tokens that it holds in any tier
  uint32_t device_matched_tokens = 0;  ///< the part of them in device memory
  uint32_t moved_tokens = 0;  ///< prompt tokens that no decode instance of its group holds; 0 with one engine

  bool PrefillRoom(uint32_t uncached_tokens) const;  ///< Returns whether the caps allow one more prefill.
  bool DecodeRoom(uint32_t tokens) const;            ///< Returns whether the caps allow one more decode.
  /// Returns the predicted time until the instance has computed its current prefills.
  Nanos QueueTime(Nanos now) const;
  /// Returns the predicted time of one prefill alone.
  Nanos PrefillTime(uint32_t prompt_tokens, uint32_t cached_tokens) const;
  /// Returns the predicted time that one more prefill adds to the queue. It is less than PrefillTime() on a
  /// busy instance, whose requests share steps and their fixed cost.
  Nanos AddedTime(uint32_t prompt_tokens, uint32_t cached_tokens) const;
};

/// The request at hand.
struct RequestView {
  RequestId id;
  PromptFacts facts;
  Nanos received = 0;  ///< start of TTFT
  Nanos waiting = 0;   ///< duration of its wait in the current queue
  uint32_t output_tokens = 0;
  int prefill_instance = -1;  ///< for the decode choice; -1 otherwise
  int session_instance = -1;  ///< instance of the session's last request; a hint
  uint32_t uncached = 0;      ///< prompt tokens that no instance had when it was submitted
  Nanos work = 0;             ///< predicted prefill time with the best known prefix
  bool must_place = false;    ///< the starvation bound has passed: a free slot must be used
};

/// Times of moving KV from a prefill to a decode instance.
struct TransferCost {
  Nanos latency = 2 * kMillisecond;
  double nanos_per_token = 0;
  Nanos Of(uint32_t tokens) const {
    return tokens == 0 ? 0 : latency + static_cast<Nanos>(nanos_per_token * tokens);
  }
};

struct Choice {
  enum class Kind : uint8_t { kPlace, kHold, kReject };
  Kind kind = Kind::kHold;
  int instance = -1;     ///< chosen instance; with kHold, the one that the request waits for, or -1
  Nanos hold_until = 0;  ///< time of the next attempt; 0: when something changes
  static Choice Place(int id) { return {.kind = Kind::kPlace, .instance = id, .hold_until = 0}; }
  static Choice Hold(int id = -1, Nanos until = 0) {
    return {.kind = Kind::kHold, .instance = id, .hold_until = until};
  }
  static Choice Reject() { return {.kind = Kind::kReject, .instance = -1, .hold_until = 0}; }
};

/// Used by one thread. A policy may keep its own state, such as a round-robin position or an approximate
/// tree. The state is lost when the master changes, so correctness must not depend on it.
class Policy {
 public:
  virtual ~Policy() = default;
  virtual std::string_view name() const = 0;
  /// Orders the prefill and the decode queue: the first is placed first. Requests past the starvation bound
  /// and of higher priority are moved to the front afterwards. Default: order of arrival. `engines` is the
  /// number of instances that serve the queue.
  virtual void OrderPrefill(std::vector<RequestView>& queue, int engines, Nanos now) const;
  virtual void OrderDecode(std::vector<RequestView>& queue, Nanos now) const;
  /// Returns whether the policy respects InstanceCaps, so that requests wait in the proxy's queue. Routers
  /// without a queue send at once.
  virtual bool HoldsCaps() const { return false; }
  /// Returns whether P is skipped for requests whose prefix is on a decode instance.
  virtual bool SkipsPrefill() const { return false; }
  /// Returns false when no request can be placed now, so that a long queue need not be searched. `next` is
  /// then the time at which this changes without an event.
  virtual bool MayPlace(std::span<const InstanceView> instances, Nanos now, Nanos& next);
  virtual Choice ChoosePrefill(const RequestView& request, std::span<const InstanceView> instances,
                               Nanos now) = 0;
  virtual Choice ChooseDecode(const RequestView& request, std::span<const InstanceView> instances,
                              Nanos now) = 0;
  /// Called after this policy has placed a request.
  virtual void Placed(const RequestView& request, const InstanceView& instance, Nanos now);
  /// Called after a prefill that started at `started` has finished on `instance`, in a batch of `requests`.
  virtual void PrefillDone(int instance, uint32_t requests, Nanos started, Nanos now);
};

struct PolicyOptions {
  uint64_t seed = 1;
  /// Targets; 0: none. Policy `moesaic` orders requests by them, and `mooncake` rejects by them.
  Nanos slo_ttft = 0, slo_tpot = 0;
  bool rejects = false;  ///< policies that can shed load may do so
  uint32_t batch_tokens =
      8192;  ///< token budget of an engine's step: more prefill tokens at once do not help
  TransferCost transfer;
};

/// Returns the names in the order of tables: moesaic random round-robin least-requests least-tokens
/// sglang-cache-aware dynamo llm-d aibrix mooncake omni omni-earliest-batch.
std::span<const std::string_view> PolicyNames();
/// NotFound lists the names.
StatusOr<std::unique_ptr<Policy>> MakePolicy(std::string_view name, const PolicyOptions& options);

}  // namespace moesaic::proxy
