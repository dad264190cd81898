// Plans of graphs: order of the edges, validation, the cached transpose.
#include "science/graph.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "runtime/thread_pool.h"
#include "science/test_graphs.h"

namespace moesaic::graph {
namespace {

TEST(SegmentsTest, GroupsAreStable) {
  const std::vector<int64_t> index = {2, 0, 2, 1, 0, 2};
  const Segments segments = *GroupByIndex(Indices::Of(index.data(), 6), 4);
  EXPECT_EQ(segments.ptr, (std::vector<int32_t>{0, 2, 3, 6, 6}));
  EXPECT_EQ(segments.edge, (EdgeVector{1, 4, 3, 0, 2, 5}));
}

TEST(SegmentsTest, OrderDoesNotDependOnThreads) {
  constexpr int64_t kEdges = 70000;
  std::mt19937 rng(5);
  // 6000 segments take the path with prefetches; four threads place two arrays in pairs, three do not.
  for (const auto& [count, threads] : {std::pair(1, 3), {40, 4}, {40, 3}, {6000, 4}, {6000, 3}}) {
    const auto pool = *runtime::ThreadPool::Create({.threads = threads, .pin = false});
    std::vector<int32_t> index(kEdges);
    std::vector<int64_t> wide(kEdges), values(kEdges);
    for (int64_t e = 0; e < kEdges; ++e) {
      wide[e] = index[e] = static_cast<int32_t>(rng() % count);
      values[e] = static_cast<int64_t>(rng() % 1000);
    }
    const Segments one = *GroupByIndex(Indices::Of(index.data(), kEdges), count);
    std::vector<int32_t> expected(kEdges);
    std::iota(expected.begin(), expected.end(), 0);
    std::stable_sort(expected.begin(), expected.end(), [&](int a, int b) { return index[a] < index[b]; });
    for (int64_t p = 0; p < kEdges; ++p) ASSERT_EQ(one.EdgeAt(p), expected[p]);
    const Segments parts = *GroupByIndex(Indices::Of(wide.data(), kEdges), count, "index", pool.get());
    EXPECT_EQ(parts.ptr, one.ptr);
    EXPECT_EQ(parts.edge, one.edge);
    EdgeVector grouped;
    const Segments both =
        *GroupWithValues(Indices::Of(index.data(), kEdges), count, "index",
                         Indices::Of(values.data(), kEdges), 1000, "values", &grouped, pool.get());
    EXPECT_EQ(both.edge, one.edge);
    for (int64_t p = 0; p < kEdges; ++p) ASSERT_EQ(grouped[p], values[expected[p]]);
    values[kEdges - 1] = 1000;
    EXPECT_EQ(moesaic::Message(GroupWithValues(Indices::Of(index.data(), kEdges), count, "index",
                                               Indices::Of(values.data(), kEdges), 1000, "values", &grouped,
                                               pool.get())
                                   .status()),
              "values[69999] must be in [0, 1000), but is 1000");
    wide[50000] = count;
    EXPECT_EQ(
        moesaic::Message(GroupByIndex(Indices::Of(wide.data(), kEdges), count, "index", pool.get()).status()),
        fmt::format("index[50000] must be in [0, {}), but is {}", count, count));
  }
}

TEST(SegmentsTest, SortedIndexNeedsNoPermutation) {
  const std::vector<int32_t> index = {0, 0, 3};
  const Segments segments = *GroupByIndex(Indices::Of(index.data(), 3), 4);
  EXPECT_EQ(segments.ptr, (std::vector<int32_t>{0, 2, 2, 2, 3}));
  EXPECT_TRUE(segments.edge.empty());
}

TEST(SegmentsTest, IndexOutOfRangeIsNamed) {
  const std::vector<int32_t> index = {0, 4, -1};
  EXPECT_EQ(moesaic::Message(GroupByIndex(Indices::Of(index.data(), 3), 4).status()),
            "index[1] must be in [0, 4), but is 4");
  const std::vector<int64_t> wide = {0, -7};
  EXPECT_EQ(moesaic::Message(GroupByIndex(Indices::Of(wide.data(), 2), 4).status()),
            "index[1] must be in [0, 4), but is -7");
  const std::vector<int64_t> huge = {int64_t{1} << 32};  // 0 when truncated to 32 bits
  EXPECT_FALSE(GroupByIndex(Indices::Of(huge.data(), 1), 4).ok());
}

TEST(SegmentsTest, TooManyEdgesAreRefused) {
  const int32_t none = 0;
  EXPECT_FALSE(GroupByIndex({.data = &none, .size = int64_t{1} << 31, .wide = false}, 4).ok());
  EXPECT_FALSE(GroupByIndex({.data = &none, .size = 1, .wide = false}, int64_t{1} << 31).ok());
}

TEST(SegmentsTest, PtrIsValidated) {
  auto fault = [](std::vector<int64_t> ptr, int64_t edges) {
    return moesaic::Message(
        SegmentsFromPtr(Indices::Of(ptr.data(), static_cast<int64_t>(ptr.size())), edges).status());
  };
  EXPECT_EQ(fault({}, 0), "ptr needs one element or more, but has 0");
  EXPECT_EQ(fault({1, 2}, 2), "ptr[0] must be 0, but is 1");
  EXPECT_EQ(fault({0, 3, 2}, 3), "ptr[2] must be 3 or more, but is 2");
  EXPECT_EQ(fault({0, 3, 9}, 5), "ptr[2] must be at most 5, but is 9");
  EXPECT_EQ(fault({0, 3}, 5), "the last element of ptr must be the number of edges, 5, but is 3");
  EXPECT_EQ(fault({0, 0, 5}, 5), "");
}

TEST(SegmentsTest, RangesCoverEverySegmentButHubsOnce) {
  std::mt19937 rng(1);
  for (const bool hub : {false, true}) {
    const TestEdges edges = RandomEdges(&rng, 500, 3000, 40000, hub);
    const Graph graph = edges.Build();
    const Segments& segments = graph.by_destination();
    for (const int threads : {1, 3, 64}) {
      int32_t next = 0;
      for (const SegmentRange& range : DivideByEdges(segments, threads)) {
        if (next != range.first) {
          ASSERT_TRUE(std::binary_search(segments.hubs.begin(), segments.hubs.end(), next));
          ++next;
        }
        ASSERT_EQ(next, range.first);
        ASSERT_LT(range.first, range.last);
        next = range.last;
      }
      EXPECT_EQ(next, segments.count());
    }
  }
}

TEST(GraphTest, BothDirectionsListEveryEdge) {
  std::mt19937 rng(2);
  const TestEdges edges = RandomEdges(&rng, 37, 53, 700);
  const Graph graph = edges.Build();
  EXPECT_EQ(graph.num_src(), 37);
  EXPECT_EQ(graph.num_dst(), 53);
  EXPECT_EQ(graph.num_edges(), 700);
  for (const bool by_source : {false, true}) {
    const Adjacency& adjacency = by_source ? graph.by_source() : graph.by_destination();
    std::vector<int> seen(700, 0);
    for (int32_t p = 0; p < 700; ++p) {
      const int32_t e = adjacency.edge.empty() ? p : adjacency.edge[p];
      ++seen[e];
      EXPECT_EQ(adjacency.own()[p], by_source ? edges.src[e] : edges.dst[e]);
      EXPECT_EQ(adjacency.neighbor[p], by_source ? edges.dst[e] : edges.src[e]);
    }
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), 700);
  }
  const Graph reversed = graph.Reversed();
  EXPECT_EQ(reversed.num_src(), 53);
  EXPECT_EQ(&reversed.by_destination(), &graph.by_source());
  EXPECT_EQ(&reversed.by_source(), &graph.by_destination());
}

TEST(GraphTest, MatchesDetectsChangedEdges) {
  std::mt19937 rng(3);
  TestEdges edges = RandomEdges(&rng, 9, 9, 40);
  const Graph graph = edges.Build();
  auto src = [&] { return Indices::Of(edges.src.data(), edges.size()); };
  auto dst = [&] { return Indices::Of(edges.dst.data(), edges.size()); };
  EXPECT_TRUE(graph.Matches(src(), dst()));
  EXPECT_TRUE(graph.Reversed().Matches(dst(), src()));
  edges.src[17] = (edges.src[17] + 1) % 9;
  EXPECT_FALSE(graph.Matches(src(), dst()));
}

TEST(GraphTest, FaultsAreNamed) {
  const std::vector<int32_t> src = {0, 5}, dst = {1, 0};
  EXPECT_EQ(
      moesaic::Message(Graph::FromCoo(Indices::Of(src.data(), 2), Indices::Of(dst.data(), 2), 3, 2).status()),
      "src[1] must be in [0, 3), but is 5");
  EXPECT_EQ(
      moesaic::Message(Graph::FromCoo(Indices::Of(src.data(), 1), Indices::Of(dst.data(), 2), 6, 2).status()),
      "src and dst must have one element per edge, but have 1 and 2");
  const std::vector<int32_t> ptr = {0, 1, 2};
  EXPECT_TRUE(Graph::FromCsc(Indices::Of(ptr.data(), 3), Indices::Of(src.data(), 2), 6).ok());
  EXPECT_FALSE(Graph::FromCsc(Indices::Of(ptr.data(), 3), Indices::Of(src.data(), 2), 5).ok());
}

TEST(GraphTest, EmptyGraphsAreValid) {
  EXPECT_EQ(Graph().num_edges(), 0);
  EXPECT_EQ(Graph().by_source().count(), 0);
  const Graph isolated = *Graph::FromCoo({}, {}, 3, 4);
  EXPECT_EQ(isolated.by_destination().count(), 4);
  EXPECT_EQ(isolated.by_source().count(), 3);
}

}  // namespace
}  // namespace moesaic::graph
