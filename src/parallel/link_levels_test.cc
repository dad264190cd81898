#include "parallel/link_levels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace moesaic::parallel {
namespace {

using testing::DoubleNear;
using testing::ElementsAre;
using testing::IsEmpty;

comm::Topology TopologyOf(const std::string& text) {
  auto topology = comm::Topology::Parse(text, "test");
  EXPECT_TRUE(topology.ok()) << Message(topology.status());
  return *std::move(topology);
}

constexpr char kTwoNodes[] = R"({
  "name": "two nodes", "source": "test",
  "devices": {"fast": {"flops": {"bf16": 2e12}}, "slow": {"flops": {"bf16": 1e12}}},
  "tree": {"level": "cluster", "link": {"latency_us": 5, "gb_per_s": 10}, "children": [
    {"level": "node", "link": {"latency_us": 1, "gb_per_s": 100}, "children": [{"count": 2, "device": "fast"}]},
    {"level": "node", "link": {"latency_us": 1, "gb_per_s": 100}, "children": [{"count": 2, "device": "slow"}]}]}})";

TEST(LinkLevels, AreThoseOfNodes) {
  const std::vector<LinkLevel> levels = LinkLevelsOf(TopologyOf(kTwoNodes));
  ASSERT_EQ(levels.size(), 1U);
  EXPECT_EQ(levels[0].groups, 2);
  EXPECT_NEAR(levels[0].bytes_per_s, 1e10, 1);
  EXPECT_THAT(SpeedsOf(TopologyOf(kTwoNodes)), ElementsAre(DoubleNear(1, 1e-9), DoubleNear(1, 1e-9),
                                                           DoubleNear(0.5, 1e-9), DoubleNear(0.5, 1e-9)));
}

TEST(LinkLevels, EqualDevicesAtOneSwitchHaveNoLevels) {
  const auto flat = comm::Topology::Flat(4, {.latency_s = 1e-6, .bytes_per_s = 1e10});
  EXPECT_THAT(LinkLevelsOf(flat), IsEmpty());
  EXPECT_THAT(SpeedsOf(flat), IsEmpty());
}

}  // namespace
}  // namespace moesaic::parallel
