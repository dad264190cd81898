#include "runtime/group_limits.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace moesaic::runtime {
namespace {

class GroupLimitsTest : public testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  GroupLimits Limits() const { return {root_ / "groups", root_ / "mount"}; }

  const std::filesystem::path root_ =
      std::filesystem::path(testing::TempDir()) /
      ("moesaic-groups-" + std::string(testing::UnitTest::GetInstance()->current_test_info()->name()));
};

TEST_F(GroupLimitsTest, NoFilesMeanNoLimit) {
  EXPECT_EQ(Limits().Cores(), 0);
  EXPECT_EQ(Limits().AvailableMemory(5000), 5000);
}

// As in a container, which sees its own group as the root.
TEST_F(GroupLimitsTest, AppliesTheLimitsOfTheRootGroup) {
  Write("groups", "0::/\n");
  Write("mount/cpu.max", "150000 100000\n");
  Write("mount/memory.max", "1000\n");
  Write("mount/memory.current", "900\n");
  Write("mount/memory.stat", "anon 400\ninactive_file 200\nactive_file 300\n");
  EXPECT_EQ(Limits().Cores(), 1.5);
  EXPECT_EQ(Limits().AvailableMemory(5000), 600);
  EXPECT_EQ(Limits().AvailableMemory(500), 500);
}

// As of a service of systemd or a step of Slurm: the limit is that of a group that contains the process's
// one.
TEST_F(GroupLimitsTest, AppliesTheSmallestLimitOfNestedGroups) {
  Write("groups", "0::/system.slice/moesaic.service/child\n");
  const std::string service = "mount/system.slice/moesaic.service/";
  Write(service + "memory.max", "1000\n");
  Write(service + "memory.current", "400\n");
  Write(service + "child/memory.max", "max\n");
  Write(service + "child/memory.current", "300\n");
  Write(service + "cpu.max", "400000 100000\n");
  Write("mount/system.slice/cpu.max", "200000 100000\n");
  Write(service + "child/cpu.max", "max 100000\n");
  EXPECT_EQ(Limits().Cores(), 2);
  EXPECT_EQ(Limits().AvailableMemory(5000), 600);
}

TEST_F(GroupLimitsTest, ReadsLimitsOfControlGroupsVersion1) {
  Write("groups", "5:cpuset:/other\n4:cpu,cpuacct:/job\n3:memory:/job/step\n0::/\n");
  Write("mount/cpu/job/cpu.cfs_quota_us", "300000\n");
  Write("mount/cpu/job/cpu.cfs_period_us", "100000\n");
  Write("mount/cpu/cpu.cfs_quota_us", "-1\n");
  Write("mount/cpu/cpu.cfs_period_us", "100000\n");
  Write("mount/memory/job/memory.limit_in_bytes", "2000\n");
  Write("mount/memory/job/memory.usage_in_bytes", "700\n");
  Write("mount/memory/job/memory.stat", "total_inactive_file 100\ntotal_active_file 100\n");
  Write("mount/memory/memory.limit_in_bytes", "9223372036854771712\n");
  Write("mount/memory/memory.usage_in_bytes", "100000\n");
  EXPECT_EQ(Limits().Cores(), 3);
  EXPECT_EQ(Limits().AvailableMemory(5000), 1500);
}

}  // namespace
}  // namespace moesaic::runtime
