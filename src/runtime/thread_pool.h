// A fixed team of pinned worker threads that runs one parallel loop at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "base/status.h"
#include "runtime/topology.h"

namespace moesaic::runtime {

/// A borrowed callable `void(int64_t task, int worker)`; it must outlive the call it is passed to.
class LoopBody {
 public:
  template <typename F>
  LoopBody(const F& f)  // NOLINT(google-explicit-constructor): a lambda is passed as it is
      : object_(&f), call_([](const void* object, int64_t task, int worker) {
          (*static_cast<const F*>(object))(task, worker);
        }) {}
  void operator()(int64_t task, int worker) const { call_(object_, task, worker); }

 private:
  const void* object_;
  void (*call_)(const void*, int64_t, int);
};

/// Runs loops over its threads. The thread that calls Run is worker 0 and takes part.
/// One loop runs at a time; Run may be called from one thread at a time, and never from inside a loop.
class ThreadPool {
 public:
  struct Options {
    int threads =
        0;  ///< 0: one for each core of the process's affinity mask, within the control group's quota.
    bool pin = true;  ///< Bind workers 1, 2, ... to cores by topology (one hardware thread a core first).
    const Topology* topology = nullptr;  ///< What to take the machine for; null: what it is.
  };
  static StatusOr<std::unique_ptr<ThreadPool>> Create(const Options& options);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;

  /// The NUMA nodes on which workers are bound, by the operating system's numbers; none if they aren't bound.
  std::span<const int> numa_nodes() const;
  /// A worker's node: its place among numa_nodes(), 0 if there are none. Worker 0's is that of its core,
  /// where the calling thread stays only once PinCaller() has bound it.
  int NodeOf(int worker) const;

  /// Binds the calling thread to worker 0's core, if the pool is pinned and has a thread for every core; says
  /// whether it did. With cores to spare the thread finds a free one itself, whichever other programs take.
  /// For a thread that does little else than run loops: threads that it starts later inherit the binding.
  /// Create and Run leave the caller's binding alone.
  bool PinCaller();

  /// Calls body(task, worker) once for every task in [0, tasks), taken one by one from a shared counter,
  /// and returns when all are done. Workers spin for a short while between loops and then sleep.
  void Run(int64_t tasks, LoopBody body);

  /// Does the same for tasks [0, ends.back()), of which [ends[i - 1], ends[i]) read memory of node i (the
  /// first begin at 0). A worker takes those of its own node first, and then others, so that nobody is idle.
  /// There may be more or fewer nodes than the pool has: results do not depend on it.
  void RunByNode(std::span<const int64_t> ends, LoopBody body);

  /// Calls body(worker, worker) exactly once on every worker, at the same time: for first-touch and
  /// measurements.
  void RunOnEach(LoopBody body);

 private:
  struct Impl;
  explicit ThreadPool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::runtime
