// Records of requests and instances as processes see them. The layout in shared memory is in layout.h.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "proxy/state/stage.h"

namespace moesaic::proxy {

/// Names one use of a request slot. A handle of an earlier use is recognized by its generation.
struct RequestId {
  uint32_t slot = 0;
  uint32_t generation = 0;  // 0: no request
  explicit operator bool() const { return generation != 0; }
  friend bool operator==(const RequestId&, const RequestId&) = default;
};

/// Bounds of one instance that the scheduler never exceeds. 0: no bound.
struct InstanceCaps {
  uint32_t prefill_requests = 0;
  uint64_t prefill_tokens = 0;  ///< uncached tokens sent and not yet computed
  uint32_t decode_requests = 0;
  uint64_t decode_tokens = 0;  ///< context tokens of running requests
  uint64_t kv_blocks = 0;      ///< capacity of the engine's block pool
  friend bool operator==(const InstanceCaps&, const InstanceCaps&) = default;
};

/// An instance as configured: one engine, or one data-parallel rank of it.
struct InstanceConfig {
  std::string url;  ///< together with dp_rank the identity across reloads; at most 255 bytes
  Role role = Role::kBoth;
  uint32_t dp_rank = 0;
  uint32_t dp_ranks = 1;     ///< number of the engine's DP ranks
  uint32_t group = 0;        ///< group; a request's prefill and decode instances are of one group
  uint32_t pod = 0;          ///< pod; its DP ranks share steps: they start and end batches together
  uint32_t model_class = 0;  ///< instances of a class share a latency model
  uint32_t block_size = 16;
  double weight = 1;  ///< relative speed
  InstanceCaps caps = {};
  uint32_t batch_tokens = 8192;  ///< token budget of the engine's step (max_num_batched_tokens)
  uint32_t source = 0;           ///< number of the source that discovered it; 0: the configuration names it
  uint32_t source_key = 0;       ///< number of its key in the source, which may have several; 0: none
  uint16_t bootstrap_port = 0;   ///< of the engine's bootstrap server; 0: unknown
  bool drain = false;            ///< the engine finishes its requests and gets no others
  /// Returns whether the engine has several DP ranks, so that requests name theirs.
  bool ranked() const { return dp_ranks > 1; }
  friend bool operator==(const InstanceConfig&, const InstanceConfig&) = default;
};

/// Counters of an instance: the sum of the charges of its requests.
struct InstanceLoad {
  uint32_t prefill_requests = 0;  ///< requests whose prefill is scheduled or running
  uint64_t prefill_tokens = 0;    ///< uncached tokens of these requests
  Nanos prefill_work = 0;         ///< predicted computing time of these requests
  uint32_t decode_requests = 0;
  uint64_t decode_tokens = 0;  ///< prompt and output tokens of running requests
  uint64_t kv_blocks = 0;      ///< blocks of those tokens
  uint32_t references = 0;     ///< slots that name the instance
};

/// State of the index for one instance (docs/contracts/proxy-state.md, X5).
enum class IndexState : uint8_t { kNone, kExact, kDegraded, kReplaying };
std::string_view IndexStateName(IndexState state);

/// Version of an entry: another instance has another generation, and other settings of the same instance have
/// another revision.
struct InstanceVersion {
  uint32_t generation = 0, revision = 0;
  friend bool operator==(const InstanceVersion&, const InstanceVersion&) = default;
};

/// A copy of an instance's entry.
struct InstanceRecord {
  int id = -1;
  uint32_t generation = 0, revision = 0;
  InstanceConfig config;
  InstanceState state = InstanceState::kUnused;
  bool healthy = true;
  Nanos closed_until = 0;           ///< the circuit breaker lets no request through until then
  uint32_t failures = 0;            ///< consecutive
  uint64_t reported_kv_blocks = 0;  ///< size of its block pool by its metrics; 0: not known
  InstanceLoad load;
  IndexState index_state = IndexState::kNone;
  Nanos busy_since = 0;  ///< start of the current batch as far as known; 0: idle
  Nanos last_scheduled = 0;
  Nanos last_prefill_done = 0;
  uint64_t prefills = 0, decodes = 0, completed = 0, failed = 0;
  uint64_t prompt_tokens = 0, cached_tokens = 0, output_tokens = 0;
};

/// Facts about a request that scheduling needs.
struct PromptFacts {
  uint32_t prompt_tokens = 0;
  uint32_t max_tokens = 0;  ///< 0: unknown
  int32_t priority = 0;     ///< larger is more urgent
  uint64_t tenant = 0;      ///< hash of the API key; 0: none
  uint64_t session = 0;     ///< hash of the session or conversation; 0: none
  Mode mode = Mode::kAggregated;
  uint32_t block_size = 0;  ///< of the keys; 0: there are no keys
};

/// Token bucket of one tenant; rate 0: unlimited. A submitted request takes its prompt and its max_tokens
/// from the bucket. At its end the charge is replaced by the tokens that it used.
struct TenantLimit {
  double tokens_per_second = 0;
  double burst_tokens = 0;
};

/// Maximum number of instances that are excluded for one request after they failed it.
inline constexpr int kMaxExcluded = 4;

/// A copy of a request's slot.
struct RequestRecord {
  RequestId id;
  int worker = -1;
  Stage stage = Stage::kReceived;
  std::array<Nanos, kNumStages> entered{};  ///< 0: not entered
  PromptFacts facts;
  int prefill_instance = -1, decode_instance = -1;
  uint32_t cached_tokens = 0;  ///< predicted at dispatch; replaced by the engine's report
  uint32_t output_tokens = 0;
  uint32_t retries = 0;
  Nanos first_token = 0, last_token = 0;
  bool prefill_charged = false, decode_charged = false;
  /// The decode instance computes the prompt, because few of its tokens are uncached.
  bool prefill_skipped = false;
  bool rejected = false;  ///< the policy rejected the request: answer 429 and call Finish
  Nanos charged_work = 0;
  std::array<int16_t, kMaxExcluded> excluded{-1, -1, -1, -1};
  uint32_t num_keys = 0;
};

}  // namespace moesaic::proxy
