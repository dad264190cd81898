// Policy: chooses instances for requests. Ours and those of other routers share this interface.
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

  bool PrefillRoom(uint32_t uncached_tokens) const;  ///< the caps allow one more prefill
  bool DecodeRoom(uint32_t tokens) const;            ///< the caps allow one more running request
  /// Predicted time until the prefills that it has are computed.
  Nanos QueueTime(Nanos now) const;
  /// Predicted time of one prefill alone.
  Nanos PrefillTime(uint32_t prompt_tokens, uint32_t cached_tokens) const;
  /// Predicted time by which one more prefill makes the queue longer: requests of a busy instance share its
  /// steps, and with them the fixed cost of a step.
  Nanos AddedTime(uint32_t prompt_tokens, uint32_t cached_tokens) const;
};

/// The request at hand.
struct RequestView {
  RequestId id;
  PromptFacts facts;
  Nanos received = 0;  ///< start of TTFT
  Nanos waiting = 0;   ///< since it entered the queue it is in
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
  int instance = -1;     ///< of kHold: the instance that the request waits for, or -1
  Nanos hold_until = 0;  ///< look again at this time; 0: when something changes
  static Choice Place(int id) { return {.kind = Kind::kPlace, .instance = id, .hold_until = 0}; }
  static Choice Hold(int id = -1, Nanos until = 0) {
    return {.kind = Kind::kHold, .instance = id, .hold_until = until};
  }
  static Choice Reject() { return {.kind = Kind::kReject, .instance = -1, .hold_until = 0}; }
};

/// Used by one thread. A policy may keep state of its own (a round-robin position, an approximate tree); it
/// is lost when the master changes, and must not be needed for correctness.
class Policy {
 public:
  virtual ~Policy() = default;
  virtual std::string_view name() const = 0;
  /// Orders the prefill and the decode queue: the first is placed first. Requests past the starvation bound
  /// and of higher priority are moved to the front afterwards. Default: order of arrival. `engines` is the
  /// number of instances that serve the queue.
  virtual void OrderPrefill(std::vector<RequestView>& queue, int engines, Nanos now) const;
  virtual void OrderDecode(std::vector<RequestView>& queue, Nanos now) const;
  /// True when the bounds of InstanceCaps hold for this policy, and requests wait in the proxy's queue.
  /// Routers without a queue of their own send at once.
  virtual bool HoldsCaps() const { return false; }
  /// True when P is skipped for requests whose prefix is on a decode instance.
  virtual bool SkipsPrefill() const { return false; }
  /// False when no request could be placed now; sets `next` to the time at which this changes by itself.
  /// Spares the work of looking at a long queue.
  virtual bool MayPlace(std::span<const InstanceView> instances, Nanos now, Nanos& next);
  virtual Choice ChoosePrefill(const RequestView& request, std::span<const InstanceView> instances,
                               Nanos now) = 0;
  virtual Choice ChooseDecode(const RequestView& request, std::span<const InstanceView> instances,
                              Nanos now) = 0;
  /// A request was placed by this policy.
  virtual void Placed(const RequestView& request, const InstanceView& instance, Nanos now);
  /// A prefill has finished on `instance` after `time` in a batch of `requests`.
  virtual void PrefillDone(int instance, uint32_t requests, Nanos started, Nanos now);
};

struct PolicyOptions {
  uint64_t seed = 1;
  Nanos slo_ttft = 0, slo_tpot = 0;  ///< 0: none; ours orders by them, Mooncake rejects by them
  bool rejects = false;              ///< policies that can shed load may do so
  uint32_t batch_tokens =
      8192;  ///< token budget of an engine's step: more prefill tokens at once do not help
  TransferCost transfer;
};

/// Names in the order of tables: moesaic random round-robin least-requests least-tokens sglang-cache-aware
/// dynamo llm-d aibrix mooncake omni omni-earliest-batch.
std::span<const std::string_view> PolicyNames();
/// NotFound lists the names.
StatusOr<std::unique_ptr<Policy>> MakePolicy(std::string_view name, const PolicyOptions& options);

}  // namespace moesaic::proxy
