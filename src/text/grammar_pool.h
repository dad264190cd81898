// Compiles grammars on its own low-priority threads and caches the results.
#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "text/grammar.h"

namespace moesaic::text {

struct GrammarWaiter;

struct GrammarPoolOptions {
  int threads = 1;                 ///< grammars compiled concurrently
  int max_queued = 256;            ///< maximum queued grammars; further ones are rejected
  int max_queued_per_client = 32;  ///< maximum queued grammars of one client
  size_t cache_bytes = 64 << 20;   ///< estimated memory of cached grammars; 0: no cache
  /// CPU time limit for compiling a grammar and its first mask. llguidance cannot be interrupted during
  /// compilation, where GrammarLimits::compile_fuel bounds its work; the first mask is interrupted.
  std::chrono::milliseconds max_time{2000};
  int niceness = 10;  ///< nice value of the threads, so that the engine keeps its cores
};

/// All methods are thread-safe.
class GrammarPool {
 public:
  /// Receives copies of the compiled grammar, whose first mask is computed once for all, or the error. Runs
  /// on a thread of the pool, or inside Start() on a cache hit.
  using Done = std::function<void(StatusOr<std::vector<Grammar>>)>;

  struct Job {
    GrammarKind kind = GrammarKind::kJsonSchema;
    std::string source;
    std::string client;  ///< clients are served round-robin
    int copies = 1;
  };

  /// A position in the queue. The destructor cancels it: `done` is not called unless it is already running,
  /// and a compilation without waiters is dropped.
  class Ticket {
   public:
    Ticket() = default;
    ~Ticket();
    Ticket(Ticket&&) noexcept;
    Ticket& operator=(Ticket&&) noexcept;

   private:
    friend class GrammarPool;
    std::shared_ptr<GrammarWaiter> waiter_;
  };

  struct Stats {
    int queued = 0, running = 0, cached = 0;
    size_t cached_bytes = 0;
  };

  GrammarPool(GrammarCompiler compiler, const GrammarPoolOptions& options);
  ~GrammarPool();
  GrammarPool(const GrammarPool&) = delete;
  GrammarPool& operator=(const GrammarPool&) = delete;

  /// Queues a job. Errors: InvalidArgument if the source is too large, ResourceExhausted if too many grammars
  /// are queued, Unavailable after Stop().
  StatusOr<Ticket> Start(Job job, Done done);

  /// Drops all jobs and joins the threads. No `done` runs after it returns.
  void Stop();

  Stats stats() const;

  class Impl;

 private:
  const std::shared_ptr<Impl> impl_;
};

}  // namespace moesaic::text
