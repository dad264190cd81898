// The thread that runs an engine, and the way in for all others.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "base/status.h"
#include "engine/engine.h"

namespace moesaic::engine {

struct EngineThreadOptions {
  int max_queued = 1024;  ///< requests that wait to run; more are refused
  /// Asked by the engine's thread while the destructor waits for what is stored on disk: true ends that.
  std::function<bool()> stop_saving = {};
};

/// Owns the engine and the one thread that steps it. All methods may be called from any thread, sinks
/// included; only the destructor may not be called from a sink.
class EngineThread {
 public:
  /// One request's events of one step, in order, told on the engine thread: it must not block and not throw.
  /// Never called after the request's end; destroyed then.
  using Sink = std::function<void(std::span<TokenEvent> events)>;

  EngineThread(std::unique_ptr<Engine> engine, const EngineThreadOptions& options);
  /// Cancels what is there, tells each sink its end, stores what is to be kept on disk, and joins.
  ~EngineThread();
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;

  /// InvalidArgument names what is wrong with the request; ResourceExhausted: max_queued wait already;
  /// Unavailable: draining. A request that was taken gets exactly one event with a finish reason.
  StatusOr<RequestId> Submit(Request request, Sink sink);
  /// Ends a request: its blocks are free after the step that runs now, and its sink is told. Unknown or
  /// finished ids are ignored.
  void Cancel(RequestId id);
  /// Forgets all cached blocks that no request holds, and all on disk, before the next step.
  void ClearCache();

  EngineStats stats() const;  ///< after the last step; waiting counts what was submitted since
  bool idle() const;          ///< nothing submitted has yet to end
  void Drain();               ///< refuses new requests from now on; what is there runs to its end

  const models::ModelInfo& model() const;
  int max_context() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::engine
