// The thread that runs an engine, and its interface for other threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"
#include "engine/engine.h"

namespace moesaic::engine {

struct EngineThreadOptions {
  /// Maximum number of waiting requests; more are refused. A client may have at most as many of them as
  /// places are free: half of the places if it is alone, and there is always room for another client.
  int max_queued = 1024;
  /// Polled while the destructor stores blocks on disk; true ends the storing.
  std::function<bool()> stop_saving = {};
  /// The engine cannot continue after a failed step. True for an engine over several ranks.
  bool fails_for_good = false;
};

/// Owns the engine and the one thread that steps it. All methods may be called from any thread, sinks
/// included; only the destructor may not be called from a sink.
class EngineThread {
 public:
  /// Receives the events of one request and step, in order, on the engine thread. It must not block or throw.
  /// It is destroyed after the request's end.
  using Sink = std::function<void(std::span<TokenEvent> events)>;

  EngineThread(std::unique_ptr<Engine> engine, const EngineThreadOptions& options);
  /// Cancels all requests, reports their ends, stores pending blocks on disk, and joins.
  ~EngineThread();
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;

  /// Returns whether the queue has room for `count` requests of `client`. ResourceExhausted: not now;
  /// InvalidArgument: never, since they exceed the half that a client may have.
  Status CheckRoom(const std::string& client, int64_t count) const;
  /// InvalidArgument names the fault of the request; ResourceExhausted: the queue has no room for it;
  /// Unavailable: draining. An accepted request gets exactly one event with a finish reason.
  StatusOr<RequestId> Submit(Request request, Sink sink);
  /// Ends a request after the current step, releases its blocks and reports its end. Unknown or finished ids
  /// are ignored.
  void Cancel(RequestId id);
  /// Evicts all cached blocks that no request holds, and forgets those of all tiers, before the next step.
  void ClearCache();

  EngineStats stats() const;  ///< After the last step; waiting includes later submissions.
  /// EngineStats::survival, at little cost.
  std::shared_ptr<const SurvivalStats> survival() const;
  bool idle() const;       ///< All submitted requests have ended.
  void Drain();            ///< Refuses new requests; others run to their end.
  Status failure() const;  ///< The failed step after which the engine computes no more; otherwise ok.

  const models::ModelInfo& model() const;
  int max_context() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::engine
