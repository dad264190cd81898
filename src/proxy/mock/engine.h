// MockEngine: a deterministic discrete-event model of an inference engine.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "proxy/events/kv_event.h"
#include "proxy/mock/engine_options.h"

namespace moesaic::proxy {

inline constexpr Nanos kNever = std::numeric_limits<Nanos>::max();

/// Returns the id of an output token: 1 to 1000 by seed and index.
int32_t MockOutputToken(uint64_t seed, uint32_t index);

/// A request to the mock engine.
struct MockRequest {
  uint64_t id = 0;  ///< chosen by the caller, unique among live requests
  uint32_t prompt_tokens = 0;
  uint32_t output_tokens = 1;
  std::vector<uint64_t>
      keys;  ///< hashes of the full blocks of the prompt: chained, engine's own or the trace's
  std::vector<int32_t> tokens;  ///< prompt ids for events; empty: events carry hashes only
  uint64_t output_seed = 0;     ///< ids of output tokens are MockOutputToken(output_seed, index)
  /// Prefill only: the answer is one token, and the blocks stay pinned until ReleaseRemote(id).
  bool prefill_only = false;
  /// Decode with KV from another engine: the blocks are allocated at once and are ready after a transfer that
  /// starts at `remote_ready`. A prompt suffix of `uncomputed_tokens` is prefilled here.
  bool remote_prefill = false;
  Nanos remote_ready = 0;
  uint32_t uncomputed_tokens = 0;
};

/// An output of a request.
struct MockOutput {
  enum class Kind : uint8_t {
    kToken,        ///< one more token
    kFinished,     ///< the last token
    kTransferred,  ///< remote_prefill: the KV has arrived, and the prefill side may release it
    kFailed,
  };
  uint64_t id = 0;
  Kind kind = Kind::kToken;
  Nanos time = 0;
  uint32_t tokens = 0;         ///< tokens so far, this one included
  uint32_t cached_tokens = 0;  ///< prompt tokens that were not computed
};

/// A KV event message: sequence number and events.
struct MockMessage {
  uint64_t sequence = 0;
  Nanos time = 0;
  std::vector<KvEvent> events;
  bool truncated = false;  ///< its end is lost on the way
};

struct MockStats {
  uint64_t steps = 0, prefill_tokens = 0, decode_tokens = 0, cached_tokens = 0, prompt_tokens = 0,
           preemptions = 0, evicted_blocks = 0;
  uint32_t running = 0, waiting = 0, free_blocks = 0;
  Nanos busy = 0;
};

/// Continuous batching as in vLLM's V1 scheduler: a step runs all decode rows and fills the rest of the token
/// budget with prefill chunks in order of arrival. Blocks have reference counts and an LRU list of cached
/// blocks without references. When a block is needed and none is free, the youngest sequence is preempted.
///
/// The caller passes the time: Advance(now) processes all events up to `now`, and NextEvent() returns the
/// time of the next one. Two runs with the same calls give the same results. One thread.
class MockEngine {
 public:
  explicit MockEngine(const MockEngineOptions& options);
  ~MockEngine();
  MockEngine(MockEngine&&) noexcept;

  /// Queues a request. ResourceExhausted when it can never fit, InvalidArgument when it contradicts itself.
  Status Submit(MockRequest request, Nanos now);
  /// Ends a request without an output. Returns false when it is not known.
  bool Cancel(uint64_t id, Nanos now);
  /// Reports that the remote prefill of `id`, submitted with remote_ready = kNever, has finished at `ready`.
  bool RemoteReady(uint64_t id, Nanos ready, Nanos now);
  /// Unpins the blocks of a prefill_only request after the decode side has read them.
  bool ReleaseRemote(uint64_t id, Nanos now);
  /// Drops all cached blocks that are not in use, with an event.
  void ResetCache(Nanos now);
  /// Ends all requests and clears the cache, like a restart. Sequence numbers begin again.
  void Restart(Nanos now);

  void Advance(Nanos now);
  Nanos NextEvent() const;

  /// Return outputs and messages since the last call, in the order of time.
  void TakeOutputs(std::vector<MockOutput>& outputs);
  void TakeMessages(std::vector<MockMessage>& messages);
  /// Returns the messages from `sequence` on, as a replay socket sends them. The last 10,000 are kept.
  std::vector<MockMessage> Replay(uint64_t sequence) const;

  /// Returns the number of leading blocks of `keys` in the cache.
  uint32_t CachedBlocks(std::span<const uint64_t> keys) const;
  MockStats stats() const;
  const MockEngineOptions& options() const;
  /// Replaces the faults. An engine that stood still continues when `stall_until` is over, and
  /// `slowdown` counts for the rest of a step that runs.
  void SetFaults(const MockFaults& faults, Nanos now);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::proxy
