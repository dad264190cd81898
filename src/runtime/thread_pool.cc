#include "runtime/thread_pool.h"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/check.h"

namespace moesaic::runtime {
namespace {

// A decode step runs some hundred loops with gaps of a few microseconds. Waking a sleeping thread costs 5 to
// 50 us, partly of the caller's time. Workers therefore spin over such gaps and release the core soon after
// the last loop of a step. Idle workers also spin until the current loop completes (at most kLoopSpinTime),
// because the next loop usually follows immediately.
constexpr std::chrono::microseconds kSpinTime{50};
constexpr std::chrono::microseconds kLoopSpinTime{1000};
constexpr int kPausesPerClockRead = 32;  // a pause is 40 to 140 cycles, a clock read about 60

// `gate` tells whether workers may join the current loop, and counts the workers inside it.
constexpr uint32_t kOpen = 1U << 31;

// Returns the node that has `cpu`; null if none has.
const NumaNode* NodeOfCpu(const std::vector<NumaNode>& nodes, int cpu) {
  for (const NumaNode& node : nodes) {
    if (std::ranges::find(node.cpus, cpu) != node.cpus.end()) return &node;
  }
  return nullptr;
}

// Returns the hardware threads of the NUMA node of `cpu`; all if no node has it.
std::vector<int> CpusOfNode(const Topology& topology, int cpu) {
  const NumaNode* const node = NodeOfCpu(topology.numa_nodes, cpu);
  return node != nullptr ? node->cpus : topology.cpus;
}

// Spins until `done()` is true and returns whether it became true. Gives up kSpinTime after `in_loop()` was
// last true, or kLoopSpinTime after the start while `in_loop()` stays true.
template <typename Done, typename InLoop>
bool SpinUntil(bool may_spin, const Done& done, const InLoop& in_loop) {
  if (done()) return true;
  if (!may_spin) return false;
  auto now = std::chrono::steady_clock::now();
  const auto longest = now + kLoopSpinTime;
  auto deadline = now + kSpinTime;
  do {
    for (int i = 0; i < kPausesPerClockRead; ++i) {
      if (done()) return true;
      _mm_pause();
    }
    now = std::chrono::steady_clock::now();
    if (now < longest && in_loop()) deadline = now + kSpinTime;
  } while (now < deadline);
  return false;
}

}  // namespace

// Tasks [next, end) of one NUMA node, or of all nodes. The queue has its own cache line: workers of the node
// access it constantly, other workers only when their own queue is empty.
struct alignas(64) TaskQueue {
  std::atomic<int64_t> next{0};
  int64_t end = 0;
};

// Worker 0 writes `body`, the queues and `each` while the gate is closed and no worker is inside. Then it
// opens the gate and increments `epoch`. A worker joins by incrementing the count in the open gate. A worker
// that wakes late finds the gate closed and sleeps again. A loop thus never waits for a worker that took no
// part in it, for example because its core was taken.
// NOLINTNEXTLINE(clang-analyzer-optin.performance.Padding): spinning threads need separate cache lines
struct ThreadPool::Impl {
  std::vector<int> cpus;
  std::vector<std::thread> workers;
  int threads = 1;
  bool pinned = false;
  bool may_spin = true;  // false if threads share cores: spinning would take time from the thread that works
  std::vector<int> numa_nodes;      // the operating system's numbers
  std::vector<int> node_of_worker;  // indices into numa_nodes

  alignas(64) std::atomic<int> epoch{0};  // int, because futexes wait on an int
  alignas(64) std::atomic<uint32_t> gate{0};

  alignas(64) std::atomic<int> arrived{0};  // workers that have entered the current RunOnEach
  std::atomic<int> each_id{0};              // number of RunOnEach calls; the current one is `each`
  std::atomic<bool> stop{false};
  std::optional<LoopBody> body;
  std::vector<TaskQueue> queues;
  int queues_used = 0;
  bool each = false;
  std::function<void()> poll;       // of worker 0
  std::atomic<bool> failed{false};  // a body has thrown `exception`
  std::exception_ptr exception;

  bool Join() {
    uint32_t g = gate.load(std::memory_order_acquire);
    while ((g & kOpen) != 0) {
      if (gate.compare_exchange_weak(g, g + 1, std::memory_order_acquire)) return true;
    }
    return false;
  }

  void Leave() {
    // The last worker to leave a closed gate wakes worker 0.
    if (gate.fetch_sub(1, std::memory_order_acq_rel) == 1) gate.notify_one();
  }

  // An exception ends the loop: it must not end a worker's thread, nor leave the caller while others run the
  // body.
  void TakeTasks(int worker) {
    const int own = node_of_worker[worker];
    try {
      for (int i = 0; i < queues_used; ++i) {
        TaskQueue& queue = queues[(own + i) % queues_used];
        for (int64_t task; (task = queue.next.fetch_add(1, std::memory_order_relaxed)) < queue.end;) {
          (*body)(task, worker);
          if (worker == 0 && poll) poll();
        }
      }
    } catch (...) {
      Keep(std::current_exception());
      for (int i = 0; i < queues_used; ++i) {
        queues[i].next.store(queues[i].end, std::memory_order_relaxed);
      }
    }
  }

  // Runs the body of RunOnEach.
  void RunOwn(int worker) {
    try {
      (*body)(worker, worker);
    } catch (...) {
      Keep(std::current_exception());
    }
  }

  void Keep(std::exception_ptr thrown) {
    if (!failed.exchange(true, std::memory_order_relaxed)) exception = std::move(thrown);
  }

  // Throws the exception that ended the loop, if any. Call it when all workers have left.
  void Rethrow() {
    if (!failed.load(std::memory_order_relaxed)) return;
    failed.store(false, std::memory_order_relaxed);
    std::rethrow_exception(std::exchange(exception, nullptr));
  }

  // Determines the node to which each worker is bound.
  void FindNodes(const std::vector<NumaNode>& nodes) {
    node_of_worker.assign(threads, 0);
    for (int worker = 0; pinned && worker < threads; ++worker) {
      const NumaNode* const node = NodeOfCpu(nodes, cpus[worker]);
      if (node == nullptr) continue;
      auto place = std::find(numa_nodes.begin(), numa_nodes.end(), node->index);
      if (place == numa_nodes.end()) place = numa_nodes.insert(place, node->index);
      node_of_worker[worker] = static_cast<int>(place - numa_nodes.begin());
    }
  }

  bool InLoop() const { return gate.load(std::memory_order_relaxed) != 0; }

  void WaitForAll() {
    const auto all = [&] { return arrived.load(std::memory_order_acquire) >= threads; };
    // A worker that has not arrived may need this very core. Real-time threads do not preempt others of the
    // same priority (workers inherit the creator's priority, and callers must keep it).
    while (!SpinUntil(may_spin, all, [] { return false; })) std::this_thread::yield();
  }

  void Work(int worker) {
    int seen = 0;
    int each_done = 0;
    for (;;) {
      auto called = [&] { return epoch.load(std::memory_order_acquire) != seen; };
      if (!SpinUntil(may_spin, called, [this] { return InLoop(); })) {
        epoch.wait(seen, std::memory_order_acquire);
        continue;
      }
      seen = epoch.load(std::memory_order_acquire);
      if (stop.load(std::memory_order_acquire)) return;
      if (!Join()) continue;
      if (!each) {
        TakeTasks(worker);
      } else if (each_id.load(std::memory_order_relaxed) != each_done) {
        each_done = each_id.load(std::memory_order_relaxed);
        arrived.fetch_add(1, std::memory_order_acq_rel);
        WaitForAll();
        RunOwn(worker);
      }
      Leave();
    }
  }

  void Open() {
    gate.store(kOpen, std::memory_order_release);
    epoch.fetch_add(1, std::memory_order_release);
    epoch.notify_all();
  }

  void CloseWhenEmpty() {
    uint32_t inside = gate.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
    auto empty = [&] { return (inside = gate.load(std::memory_order_acquire)) == 0; };
    if (inside == 0) return;
    while (!SpinUntil(may_spin, empty, [] { return true; })) gate.wait(inside, std::memory_order_acquire);
  }
};

ThreadPool::ThreadPool(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

StatusOr<std::unique_ptr<ThreadPool>> ThreadPool::Create(const Options& options) {
  constexpr int kMaxThreads = 4096;
  if (options.threads < 0 || options.threads > kMaxThreads) {
    return InvalidArgument("the number of threads must be 1 to {}, or 0 for one per core, found {}",
                           kMaxThreads, options.threads);
  }
  const Topology topology = options.topology != nullptr ? *options.topology : DetectTopology();
  auto impl = std::make_unique<Impl>();
  impl->threads = options.threads > 0 ? options.threads : topology.DefaultThreads();
  impl->cpus = topology.cpus;
  impl->may_spin = impl->threads <= static_cast<int>(topology.cpus.size());
  // If there are more threads than hardware threads, the scheduler places them: pinning would tie two to one
  // core.
  const bool pin = impl->pinned = options.pin && impl->may_spin;
  // Other processes may use spare cores, and their first choice would be the same. The system then finds free
  // cores of the node.
  const bool spare_cores = impl->threads < topology.cores;
  impl->FindNodes(topology.numa_nodes);
  std::unique_ptr<ThreadPool> pool(new ThreadPool(std::move(impl)));
  Impl* shared = pool->impl_.get();
  for (int worker = 1; worker < shared->threads; ++worker) {
    try {
      shared->workers.emplace_back([shared, worker] { shared->Work(worker); });
    } catch (const std::system_error& error) {
      return ResourceExhausted("can't start thread {} of {}: {}", worker + 1, shared->threads, error.what());
    }
    if (pin) {
      const int cpu = shared->cpus[worker];
      BindToCpus(spare_cores ? CpusOfNode(topology, cpu) : std::vector{cpu},
                 shared->workers.back().native_handle());
    }
  }
  return pool;
}

ThreadPool::~ThreadPool() {
  impl_->stop.store(true, std::memory_order_release);
  impl_->epoch.fetch_add(1, std::memory_order_release);
  impl_->epoch.notify_all();
  for (std::thread& worker : impl_->workers) worker.join();
}

int ThreadPool::size() const { return impl_->threads; }

std::span<const int> ThreadPool::numa_nodes() const { return impl_->numa_nodes; }

int ThreadPool::NodeOf(int worker) const { return impl_->node_of_worker[worker]; }

bool ThreadPool::PinCaller() {
  return impl_->pinned && impl_->threads == static_cast<int>(impl_->cpus.size()) &&
         BindToCpus({impl_->cpus[0]});
}

void ThreadPool::SetPoll(std::function<void()> poll) { impl_->poll = std::move(poll); }

void ThreadPool::Run(int64_t tasks, LoopBody body) { RunByNode({&tasks, 1}, body); }

void ThreadPool::RunByNode(std::span<const int64_t> ends, LoopBody body) {
  Impl& s = *impl_;
  const int64_t tasks = ends.back();
  if (s.threads == 1 || tasks <= 1) {
    for (int64_t task = 0; task < tasks; ++task) {
      body(task, 0);
      if (s.poll) s.poll();
    }
    return;
  }
  s.body = body;
  s.each = false;
  s.queues_used = static_cast<int>(ends.size());
  if (s.queues.size() < ends.size()) s.queues = std::vector<TaskQueue>(ends.size());
  for (size_t i = 0; i < ends.size(); ++i) {
    s.queues[i].next.store(i == 0 ? 0 : ends[i - 1], std::memory_order_relaxed);
    s.queues[i].end = ends[i];
  }
  s.Open();
  s.TakeTasks(0);
  s.CloseWhenEmpty();
  s.Rethrow();
}

void ThreadPool::RunOnEach(LoopBody body) {
  Impl& s = *impl_;
  s.body = body;
  s.each = true;
  s.each_id.fetch_add(1, std::memory_order_relaxed);
  s.arrived.store(1, std::memory_order_relaxed);
  s.Open();
  s.WaitForAll();
  s.RunOwn(0);
  s.CloseWhenEmpty();
  s.Rethrow();
}

}  // namespace moesaic::runtime
