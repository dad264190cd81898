#include "runtime/topology.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <set>

namespace moesaic::runtime {
namespace {

TEST(Topology, IsConsistentWithTheAffinityMask) {
  const Topology t = DetectTopology();
  cpu_set_t set;
  ASSERT_EQ(sched_getaffinity(getpid(), sizeof set, &set), 0);
  const std::set<int> cpus(t.cpus.begin(), t.cpus.end());
  EXPECT_EQ(cpus.size(), t.cpus.size());
  EXPECT_EQ(static_cast<int>(cpus.size()), CPU_COUNT(&set));
  for (int cpu : cpus) EXPECT_TRUE(CPU_ISSET(cpu, &set));
  EXPECT_EQ(t.hardware_threads, CPU_COUNT(&set));
  EXPECT_GE(t.cores, 1);
  EXPECT_LE(t.cores, t.hardware_threads);
  EXPECT_GE(t.DefaultThreads(), 1);
  EXPECT_LE(t.DefaultThreads(), t.cores);
  EXPECT_GT(t.memory_bytes, t.available_bytes);
  EXPECT_GT(t.available_bytes, 0);
}

TEST(Topology, QuotaLimitsThreads) {
  Topology t;
  t.cores = 64;
  EXPECT_EQ(t.DefaultThreads(), 64);
  t.cpu_quota = 1.5;
  EXPECT_EQ(t.DefaultThreads(), 2);
  t.cpu_quota = 0.1;
  EXPECT_EQ(t.DefaultThreads(), 1);
}

}  // namespace
}  // namespace moesaic::runtime
