// Splits a loop's tasks into one ordered range per worker.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "kernels/exec_context.h"

namespace moesaic::kernels {

/// Each worker takes the tasks of its own range in order, then the remaining ones of other ranges. Adjacent
/// tasks thus run on one worker, which knows its next task. Results must not depend on the assignment.
class TaskQueues {
 public:
  /// Allocates from ctx.scratch. There is one range per worker, but at most `tasks` ranges.
  TaskQueues(const ExecContext& ctx, int64_t tasks)
      : pool_(ctx.pool),
        queues_(ctx.scratch->Take<Queue>(tasks < ctx.pool->size() ? tasks : ctx.pool->size())) {}

  int count() const { return static_cast<int>(queues_.size()); }
  void Set(int queue, int64_t begin, int64_t end) { queues_[queue] = {begin, end}; }
  /// Splits [0, tasks) into ranges that differ in length by at most one.
  void SetEven(int64_t tasks) {
    for (int i = 0; i < count(); ++i) Set(i, tasks * i / count(), tasks * (i + 1) / count());
  }

  /// Calls body(task, next, worker) once for every task; `next` is the worker's most likely next task, or -1.
  template <typename F>
  void Run(const F& body) const {
    const int all = count();
    pool_->Run(all, [&](int64_t, int worker) {
      for (int i = 0; i < all; ++i) {
        Queue& queue = queues_[(worker + i) % all];
        const std::atomic_ref<int64_t> at(queue.at);
        for (int64_t task; (task = at.fetch_add(1, std::memory_order_relaxed)) < queue.end;) {
          body(task, i == 0 && task + 1 < queue.end ? task + 1 : -1, worker);
        }
      }
    });
  }

 private:
  struct alignas(64) Queue {  // one cache line per queue: its worker accesses it constantly
    int64_t at, end;
  };
  runtime::ThreadPool* pool_;
  std::span<Queue> queues_;
};

}  // namespace moesaic::kernels
