// A fixed team of pinned worker threads that runs one parallel loop at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "base/status.h"
#include "runtime/topology.h"

namespace moesaic::runtime {

/// A borrowed callable `void(int64_t task, int worker)`. The callable must outlive the call that receives it.
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

/// Runs loops over its threads. The thread that calls Run() is worker 0 and takes part. One loop runs at a
/// time: Run() must not be called from two threads concurrently, nor from inside a loop. If a body throws, no
/// further task of the loop begins, and the first exception is thrown on the caller when all workers have
/// left the loop.
class ThreadPool {
 public:
  struct Options {
    /// 0: one thread per core of the process's affinity mask, within the control group's quota.
    int threads = 0;
    /// Binds workers 1, 2, ... to cores by topology (first one hardware thread per core). With fewer threads
    /// than cores, each worker may run on all hardware threads of its core's NUMA node.
    bool pin = true;
    const Topology* topology = nullptr;  ///< Topology to assume for the machine; null: the detected one.
  };
  static StatusOr<std::unique_ptr<ThreadPool>> Create(const Options& options);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const;

  /// Returns the NUMA nodes to which workers are bound (the operating system's numbers); empty if they are
  /// not bound.
  std::span<const int> numa_nodes() const;
  /// Returns a worker's node as an index into numa_nodes(), or 0 if that is empty. Worker 0's node is that of
  /// its core, where the calling thread is guaranteed to run only after PinCaller().
  int NodeOf(int worker) const;

  /// Binds the calling thread to worker 0's core if the pool is pinned and has a thread for every core.
  /// Returns whether it did. With spare cores the operating system finds a free one for the thread instead.
  /// Call it from a thread that does little else than run loops: threads that it starts later inherit the
  /// binding. Create() and Run() do not change the caller's binding.
  bool PinCaller();

  /// Calls body(task, worker) once for every task in [0, tasks) and returns when all calls are complete.
  /// Workers take tasks one by one from a shared counter. Between loops they spin for a short time and then
  /// sleep.
  void Run(int64_t tasks, LoopBody body);

  /// Runs tasks [0, ends.back()) like Run(), where tasks [ends[i - 1], ends[i]) read memory of node i (the
  /// first range begins at 0). A worker takes tasks of its own node first, then those of other nodes. `ends`
  /// may have more or fewer nodes than the pool: results do not depend on it.
  void RunByNode(std::span<const int64_t> ends, LoopBody body);

  /// Run() and RunByNode() call `poll` on their caller's thread after each of its tasks, until it is set to
  /// null. For messages that advance while the thread computes.
  void SetPoll(std::function<void()> poll);

  /// Calls body(worker, worker) exactly once on every worker, all of them concurrently: for first-touch and
  /// measurements.
  void RunOnEach(LoopBody body);

 private:
  struct Impl;
  explicit ThreadPool(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moesaic::runtime
