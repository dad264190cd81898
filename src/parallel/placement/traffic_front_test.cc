#include "parallel/placement/traffic_front.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "parallel/placement/load_generator.h"

namespace moesaic::parallel {
namespace {

constexpr Routing kDeepSeek{.top_k = 8, .groups = 8, .top_groups = 4};

TEST(TrafficFront, DominatesBothPlansOfEplb) {
  for (const uint64_t seed : {1, 2, 9}) {
    const auto loads = GenerateLoads({.layers = 3, .workloads = 1, .seed = seed});
    const auto points = PlanFront(*loads, {.ranks = 32, .slots = 288, .nodes = 4, .routing = kDeepSeek});
    ASSERT_TRUE(points.ok()) << points.status();
    int baselines = 0;
    for (const FrontPoint& point : *points) {
      EXPECT_GE(point.worst, point.mean);
      EXPECT_LE(point.remote_nodes, 3);
      if (point.name == "moesaic") continue;
      ++baselines;
      EXPECT_TRUE(point.dominated) << point.name << ", seed " << seed;
    }
    EXPECT_EQ(baselines, 2);
    // Ours begins with the best balance and ends with the least traffic.
    EXPECT_LT(points->front().mean, 1.01);
    EXPECT_GT(
        std::count_if(points->begin(), points->end(),
                      [](const FrontPoint& point) { return point.name == "moesaic" && !point.dominated; }),
        3);
  }
}

TEST(TrafficFront, LeavesOutPlansThatEplbRefuses) {
  const auto loads = GenerateLoads({.layers = 1, .workloads = 2});
  const auto points = PlanFront(*loads, {.ranks = 32, .slots = 300, .nodes = 4, .routing = kDeepSeek});
  ASSERT_TRUE(points.ok()) << points.status();
  for (const FrontPoint& point : *points) EXPECT_EQ(point.name, "moesaic");
}

TEST(TrafficFront, RefusesSizesAndStops) {
  const auto loads = GenerateLoads({.layers = 1, .workloads = 1});
  EXPECT_EQ(PlanFront(*loads, {.ranks = 32, .slots = 288, .nodes = 1}).status().message(),
            "nodes must be 2 or more, found 1");
  EXPECT_EQ(PlanFront(*loads, {.ranks = 32, .slots = 288, .nodes = 4}).status().message(),
            "nodes must divide the 1 groups, found 4");
  FrontOptions options{.ranks = 32, .slots = 288, .nodes = 4, .routing = kDeepSeek};
  options.stop = [] { return true; };
  EXPECT_EQ(PlanFront(*loads, options).status().code(), StatusCode::kCancelled);
}

}  // namespace
}  // namespace moesaic::parallel
