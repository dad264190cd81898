// A loop's tasks in order, in a range for each worker.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "kernels/ops.h"

namespace moesaic::kernels {

/// Each worker takes the tasks of its own range in order, then what is left of others': so tasks that stand
/// beside each other are of one worker, who knows which comes next. No result may depend on who does what.
class TaskQueues {
 public:
  /// Memory comes from ctx.scratch. There are as many ranges as workers, but no more than `tasks`.
  TaskQueues(const ExecContext& ctx, int64_t tasks)
      : pool_(ctx.pool),
        queues_(ctx.scratch->Take<Queue>(tasks < ctx.pool->size() ? tasks : ctx.pool->size())) {}

  int count() const { return static_cast<int>(queues_.size()); }
  void Set(int queue, int64_t begin, int64_t end) { queues_[queue] = {begin, end}; }
  /// Ranges of as many tasks each, one more or less, of [0, tasks).
  void SetEven(int64_t tasks) {
    for (int i = 0; i < count(); ++i) Set(i, tasks * i / count(), tasks * (i + 1) / count());
  }

  /// Calls body(task, next, worker) once for every task; next: what the worker will most likely take then, or
  /// -1.
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
  struct alignas(64) Queue {  // a line of its own: its worker takes from it all the time
    int64_t at, end;
  };
  runtime::ThreadPool* pool_;
  std::span<Queue> queues_;
};

}  // namespace moesaic::kernels
