#include "runtime/thread_pool.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <new>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "runtime/test_topology.h"
#include "runtime/topology.h"

namespace moesaic::runtime {
namespace {

std::unique_ptr<ThreadPool> MakePool(int threads) {
  auto pool = ThreadPool::Create({.threads = threads, .pin = true});
  EXPECT_TRUE(pool.ok());
  return *std::move(pool);
}

class ThreadPoolTest : public testing::TestWithParam<int> {};

TEST_P(ThreadPoolTest, RunsEveryTaskOnce) {
  auto pool = MakePool(GetParam());
  EXPECT_EQ(pool->size(), GetParam());
  for (int64_t tasks : {0, 1, 2, 3, 100, 1000}) {
    std::vector<std::atomic<int>> ran(tasks);
    pool->Run(tasks, [&](int64_t task, int worker) {
      EXPECT_GE(worker, 0);
      EXPECT_LT(worker, GetParam());
      ran[task].fetch_add(1);
    });
    for (auto& count : ran) EXPECT_EQ(count.load(), 1);
  }
}

TEST_P(ThreadPoolTest, ThrowsTheExceptionOfATaskWhenAllWorkersHaveLeft) {
  auto pool = MakePool(GetParam());
  for (const int64_t bad : {0, 5, 99}) {
    std::atomic<int> inside{0};
    EXPECT_THROW(pool->Run(100,
                           [&](int64_t task, int) {
                             ++inside;
                             if (task != bad) std::this_thread::yield();
                             --inside;
                             if (task == bad) throw std::bad_alloc();
                           }),
                 std::bad_alloc);
    EXPECT_EQ(inside.load(), 0) << "a worker still runs the body";
    EXPECT_THROW(pool->RunOnEach([&](int64_t, int) { throw std::length_error("each"); }), std::length_error);
  }
  std::atomic<int64_t> sum{0};
  pool->Run(100, [&](int64_t task, int) { sum += task; });
  EXPECT_EQ(sum.load(), 4950) << "the pool still works";
}

// Loops follow each other immediately, and also after pauses in which the workers fall asleep.
TEST_P(ThreadPoolTest, RunsManyShortLoops) {
  auto pool = MakePool(GetParam());
  int64_t expected = 0;
  std::atomic<int64_t> sum{0};
  for (int loop = 0; loop < 3000; ++loop) {
    const int64_t tasks = loop % 7;
    pool->Run(tasks, [&](int64_t task, int) { sum.fetch_add(task + loop, std::memory_order_relaxed); });
    for (int64_t task = 0; task < tasks; ++task) expected += task + loop;
    if (loop % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    ASSERT_EQ(sum.load(), expected);
  }
}

TEST_P(ThreadPoolTest, RunOnEachReachesEveryWorkerOnceConcurrently) {
  auto pool = MakePool(GetParam());
  for (int round = 0; round < 200; ++round) {
    std::vector<std::atomic<int>> ran(GetParam());
    std::atomic<int> inside{0};
    pool->RunOnEach([&](int64_t task, int worker) {
      EXPECT_EQ(task, worker);
      ran[worker].fetch_add(1);
      inside.fetch_add(1);
      // hangs unless all workers are inside together
      while (inside.load() < GetParam()) std::this_thread::yield();
    });
    for (auto& count : ran) EXPECT_EQ(count.load(), 1);
    pool->Run(3, [](int64_t, int) {});
  }
}

TEST_P(ThreadPoolTest, WritesOfALoopAreVisibleAfterIt) {
  auto pool = MakePool(GetParam());
  std::vector<int> values(512, 0);
  for (int round = 1; round <= 300; ++round) {
    pool->Run(512, [&](int64_t task, int) { values[task] += 1; });
    ASSERT_EQ(std::accumulate(values.begin(), values.end(), 0), 512 * round);
  }
}

// 7 is more than most test machines have: threads then share cores and must not starve each other by
// spinning.
INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolTest, testing::Values(1, 2, 3, 7));

TEST(ThreadPool, PollsOnTheCallersThreadBetweenItsTasks) {
  for (const int threads : {1, 3}) {
    const auto pool = *ThreadPool::Create({.threads = threads, .pin = false});
    const std::thread::id caller = std::this_thread::get_id();
    int polls = 0;
    std::atomic<int> tasks_of_caller{0};
    pool->SetPoll([&] {
      EXPECT_EQ(std::this_thread::get_id(), caller);
      ++polls;
    });
    const auto task = [&](int64_t, int worker) { tasks_of_caller += worker == 0 ? 1 : 0; };
    pool->Run(100, task);
    EXPECT_EQ(polls, tasks_of_caller);
    pool->SetPoll(nullptr);
    pool->Run(100, task);
    EXPECT_LE(polls, tasks_of_caller);
  }
}

TEST(ThreadPool, DefaultSizeFollowsTopology) {
  EXPECT_EQ(MakePool(0)->size(), DetectTopology().DefaultThreads());
}

TEST(ThreadPool, CallerIsUnboundUntilPinCaller) {
  cpu_set_t before, after;
  sched_getaffinity(0, sizeof before, &before);
  std::thread([&] {
    const auto pool = *ThreadPool::Create({.threads = CPU_COUNT(&before), .pin = true});
    pool->Run(10, [](int64_t, int) {});
    sched_getaffinity(0, sizeof after, &after);
    EXPECT_TRUE(CPU_EQUAL(&before, &after));
    EXPECT_TRUE(pool->PinCaller());
    sched_getaffinity(0, sizeof after, &after);
    EXPECT_EQ(CPU_COUNT(&after), 1);
  }).join();
}

TEST(ThreadPool, CallerIsBoundOnlyByAPinnedPoolOfAllCores) {
  const auto cpus = static_cast<int>(DetectTopology().cpus.size());
  EXPECT_FALSE((*ThreadPool::Create({.threads = cpus, .pin = false}))->PinCaller());
  EXPECT_FALSE((*ThreadPool::Create({.threads = cpus + 1, .pin = true}))->PinCaller());
  if (cpus > 1) {
    EXPECT_FALSE((*ThreadPool::Create({.threads = cpus - 1, .pin = true}))->PinCaller());
  }
}

// Other processes may use the spare cores, and would begin with the same ones.
TEST(ThreadPool, WorkersMayRunOnTheirWholeNodeWhereCoresAreSpare) {
  Topology topology = DetectTopology();
  if (topology.cpus.size() < 2) GTEST_SKIP() << "needs two hardware threads";
  topology.numa_nodes = {{.index = 0, .memory_bytes = 0, .cpus = topology.cpus}};
  for (const bool spare : {false, true}) {
    topology.cores = spare ? 3 : 2;
    const auto pool = *ThreadPool::Create({.threads = 2, .pin = true, .topology = &topology});
    std::atomic<int> allowed{0};
    pool->RunOnEach([&](int64_t, int worker) {
      cpu_set_t set;
      if (worker == 1 && sched_getaffinity(0, sizeof set, &set) == 0) allowed = CPU_COUNT(&set);
    });
    EXPECT_EQ(allowed.load(), spare ? static_cast<int>(topology.cpus.size()) : 1);
    EXPECT_EQ(pool->numa_nodes().size(), 1U);
  }
}

TEST(ThreadPool, KnowsTheNodesOfItsWorkers) {
  const Topology four = SimulatedNodes(4, 2);
  const auto of = [&](int threads, bool pin) {
    return *ThreadPool::Create({.threads = threads, .pin = pin, .topology = &four});
  };
  const auto all = of(8, true);
  EXPECT_EQ(std::vector<int>(all->numa_nodes().begin(), all->numa_nodes().end()), (std::vector{0, 1, 2, 3}));
  for (int worker = 0; worker < 8; ++worker) EXPECT_EQ(all->NodeOf(worker), worker / 2);
  EXPECT_EQ(of(3, true)->numa_nodes().size(), 2U);
  EXPECT_TRUE(of(8, false)->numa_nodes().empty());
  EXPECT_TRUE(of(9, true)->numa_nodes().empty()) << "threads that share cores are not bound";
  EXPECT_EQ(of(9, true)->NodeOf(8), 0);
}

// No worker takes a second task before every worker has one.
TEST(ThreadPool, RunsTasksOfOwnNodeFirstAndCompletesAll) {
  for (const int nodes : {2, 4}) {
    const Topology topology = SimulatedNodes(nodes, 1);
    const auto pool = *ThreadPool::Create({.threads = nodes, .pin = true, .topology = &topology});
    // Equal shares, a node without tasks, and more and fewer task ranges than nodes.
    for (const std::vector<int64_t>& share :
         {std::vector<int64_t>(nodes, 10), std::vector<int64_t>{40}, std::vector<int64_t>{0, 40, 0, 0, 7}}) {
      std::vector<int64_t> ends;
      for (const int64_t tasks : share) ends.push_back((ends.empty() ? 0 : ends.back()) + tasks);
      std::vector<std::atomic<int>> ran(ends.back());
      std::vector<std::atomic<int64_t>> first(nodes);
      for (auto& task : first) task = -1;
      std::atomic<int> arrived{0};
      pool->RunByNode(ends, [&](int64_t task, int worker) {
        ran[task].fetch_add(1);
        if (first[worker] < 0) {
          first[worker] = task;
          arrived.fetch_add(1);
        }
        while (arrived.load() < nodes) std::this_thread::yield();
      });
      for (const auto& count : ran) EXPECT_EQ(count.load(), 1);
      if (share.size() != static_cast<size_t>(nodes)) continue;
      for (int worker = 0; worker < nodes; ++worker) EXPECT_EQ(first[worker] / 10, worker);
    }
  }
}

TEST(ThreadPool, RejectsInvalidThreadCounts) {
  EXPECT_EQ(ThreadPool::Create({.threads = -1}).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(ThreadPool::Create({.threads = 1 << 20}).status().code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace moesaic::runtime
