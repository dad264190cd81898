// Compiles grammars on threads of its own, at low priority, and caches the results.
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
  int threads = 1;                 ///< grammars that are compiled at once
  int max_queued = 256;            ///< grammars that wait to be compiled; more are refused
  int max_queued_per_client = 32;  ///< likewise, of one client
  size_t cache_bytes = 64 << 20;   ///< estimated memory of cached grammars; 0: no cache
  /// CPU time that a grammar may take to compile with its first mask. llguidance can't be interrupted while
  /// it compiles, where GrammarLimits::compile_fuel bounds its work; the first mask is interrupted.
  std::chrono::milliseconds max_time{2000};
  int niceness = 10;  ///< of the threads, so that the engine keeps its cores
};

/// Any thread may call all methods.
class GrammarPool {
 public:
  /// Receives the compiled grammar's copies, with their first mask computed once, or the reason why there are
  /// none. Runs on a thread of the pool, or inside Start on a cache hit.
  using Done = std::function<void(StatusOr<std::vector<Grammar>>)>;

  struct Job {
    GrammarKind kind = GrammarKind::kJsonSchema;
    std::string source;
    std::string client;  ///< clients take turns
    int copies = 1;
  };

  /// A place in the queue. The destructor gives it up: `done` is then not called, unless it runs already, and
  /// a compilation that nobody waits for is dropped.
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

  /// InvalidArgument: the source is too large; ResourceExhausted: too many grammars wait; Unavailable:
  /// stopped.
  StatusOr<Ticket> Start(Job job, Done done);

  /// Drops all jobs and joins the threads. No `done` runs after it returns.
  void Stop();

  Stats stats() const;

  class Impl;

 private:
  const std::shared_ptr<Impl> impl_;
};

}  // namespace moesaic::text
