// Graphs from coordinates against brute force.
#include "science/neighbors.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <set>

#include "science/test_graphs.h"

namespace moesaic::graph {
namespace {

using Edges = std::set<std::pair<int32_t, int32_t>>;

Edges AsSet(const EdgeList& list) {
  Edges edges;
  for (size_t i = 0; i < list.src.size(); ++i) edges.emplace(list.src[i], list.dst[i]);
  EXPECT_EQ(edges.size(), list.src.size());
  return edges;
}

std::vector<float> RandomPoints(int n, float side) {
  std::mt19937 rng(9);
  std::uniform_real_distribution<float> uniform(-side, side);
  std::vector<float> xyz(3 * n);
  for (float& x : xyz) x = uniform(rng);
  return xyz;
}

float SquaredAt(const std::vector<float>& xyz, int i, int j) {
  float sum = 0;
  for (int axis = 0; axis < 3; ++axis)
    sum += (xyz[3 * i + axis] - xyz[3 * j + axis]) * (xyz[3 * i + axis] - xyz[3 * j + axis]);
  return sum;
}

class NeighborsTest : public testing::Test {
 protected:
  std::unique_ptr<Workspace> workspace_ = *Workspace::Create(2, runtime::DetectCpu());
  Context ctx_ = workspace_->context();
};

TEST_F(NeighborsTest, NearestGraphFollowsRoseTTAFold) {
  const std::vector<float> xyz = RandomPoints(60, 10);
  for (const auto& [k, window] : std::vector<std::pair<int, int>>{{8, 0}, {8, 9}, {0, 3}, {100, 0}}) {
    Edges want;
    for (int i = 0; i < 60; ++i) {
      std::vector<std::pair<float, int>> order;
      for (int j = 0; j < 60; ++j) {
        if (j != i) order.emplace_back(SquaredAt(xyz, i, j), j);
        if (j != i && std::abs(i - j) < window) want.emplace(i, j);
      }
      std::sort(order.begin(), order.end());
      for (int c = 0; c < std::min(k, 59); ++c) want.emplace(i, order[c].second);
    }
    EXPECT_EQ(AsSet(*NearestGraph(ctx_, xyz, {.k = k, .window = window})), want) << k << " " << window;
  }
  EXPECT_TRUE(AsSet(*NearestGraph(ctx_, xyz, {.k = 1, .self = true})).count({3, 3}) > 0);
}

TEST_F(NeighborsTest, RadiusGraphMatchesBruteForce) {
  const std::vector<float> xyz = RandomPoints(300, 10);
  for (const float radius : {0.5F, 3.0F, 100.0F}) {
    Edges want;
    for (int i = 0; i < 300; ++i) {
      for (int j = 0; j < 300; ++j) {
        if (j != i && SquaredAt(xyz, i, j) <= radius * radius) want.emplace(j, i);
      }
    }
    EXPECT_EQ(AsSet(*RadiusGraph(ctx_, xyz, {.radius = radius})), want);
  }
  const EdgeList few = *RadiusGraph(ctx_, xyz, {.radius = 100, .max_neighbors = 5});
  EXPECT_EQ(few.src.size(), 1500);
  EXPECT_EQ(AsSet(*RadiusGraph(ctx_, xyz, {.radius = 0.001F, .self = true})).size(), 300);
}

TEST_F(NeighborsTest, GraphsDoNotDependOnThreads) {
  const std::vector<float> xyz = RandomPoints(2000, 20);
  EdgeList nearest, radius;
  for (const int threads : {1, 3, 4}) {
    const auto workspace = *Workspace::Create(threads, runtime::DetectCpu());
    const EdgeList list = *NearestGraph(workspace->context(), xyz, {.k = 9, .window = 5}),
                   near = *RadiusGraph(workspace->context(), xyz, {.radius = 4, .max_neighbors = 7});
    if (threads == 1) {
      nearest = list;
      radius = near;
    }
    EXPECT_TRUE(list.src == nearest.src && list.dst == nearest.dst) << threads;
    EXPECT_TRUE(near.src == radius.src && near.dst == radius.dst) << threads;
  }
}

TEST_F(NeighborsTest, SetsAreNotConnected) {
  const std::vector<float> xyz = RandomPoints(40, 1);
  const std::vector<int32_t> sets = {0, 15, 15, 40};
  for (const EdgeList& list : {*NearestGraph(ctx_, xyz, {.k = 20, .window = 4, .sets = sets}),
                               *RadiusGraph(ctx_, xyz, {.radius = 9, .sets = sets})}) {
    for (size_t e = 0; e < list.src.size(); ++e) EXPECT_EQ(list.src[e] < 15, list.dst[e] < 15);
    EXPECT_GE(list.src.size(), 15U * 14);
  }
}

TEST_F(NeighborsTest, WrongInputIsNamed) {
  std::vector<float> xyz = RandomPoints(4, 1);
  xyz[7] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(moesaic::Message(NearestGraph(ctx_, xyz, {}).status()),
            "coordinate 1 of point 2 must be finite, but is nan");
  xyz[7] = 0;
  const std::vector<int32_t> sets = {0, 3};
  EXPECT_EQ(moesaic::Message(RadiusGraph(ctx_, xyz, {.sets = sets}).status()),
            "sets must go from 0 to 4, not from 0 to 3");
  EXPECT_FALSE(RadiusGraph(ctx_, xyz, {.radius = 0}).ok());
  EXPECT_EQ(moesaic::Message(RadiusGraph(ctx_, xyz, {.max_neighbors = -5}).status()),
            "max_neighbors must be 0 or more, but is -5");
  xyz[7] = 1e18F;
  EXPECT_EQ(moesaic::Message(RadiusGraph(ctx_, xyz, {.radius = 0x1p-10F}).status()),
            "coordinate 1 of point 2 must be at most 2^52 times the radius 0.0009765625, but is 1e+18");
  EXPECT_TRUE(RadiusGraph(ctx_, xyz, {.radius = 1e3F}).ok());
  xyz[7] = 0;
  EXPECT_FALSE(NearestGraph(ctx_, xyz, {.k = -1}).ok());
  xyz.pop_back();
  EXPECT_FALSE(NearestGraph(ctx_, xyz, {}).ok());
  EXPECT_TRUE(NearestGraph(ctx_, {}, {})->src.empty());
}

}  // namespace
}  // namespace moesaic::graph
