#include "engine/expert_load.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace moesaic::engine {
namespace {

using testing::DoubleNear;
using testing::ElementsAre;
using testing::HasSubstr;
using Clock = ExpertLoadRecorder::Clock;

TEST(ExpertLoad, StagesAndReplicasAreAdded) {
  models::ExpertLoad sum;
  ASSERT_TRUE(AddExpertLoad({.layers = {4, 5}, .experts = 2, .tokens = {1, 2, 3, 4}}, &sum).ok());
  ASSERT_TRUE(AddExpertLoad({.layers = {1, 2}, .experts = 2, .tokens = {5, 6, 7, 8}}, &sum).ok());
  ASSERT_TRUE(AddExpertLoad({.layers = {4, 5}, .experts = 2, .tokens = {10, 20, 30, 40}}, &sum).ok());
  ASSERT_TRUE(AddExpertLoad({}, &sum).ok()) << "a stage of dense layers";
  EXPECT_THAT(sum.layers, ElementsAre(1, 2, 4, 5));
  EXPECT_THAT(sum.tokens, ElementsAre(5, 6, 7, 8, 11, 22, 33, 44));
}

TEST(ExpertLoad, LoadsOfOtherShapesAreRefused) {
  models::ExpertLoad sum = {.layers = {1}, .experts = 2, .tokens = {1, 2}};
  EXPECT_THAT(Message(AddExpertLoad({.layers = {1}, .experts = 3, .tokens = {1, 2, 3}}, &sum)),
              HasSubstr("must have 2 experts in a layer, found 3"));
  EXPECT_THAT(Message(AddExpertLoad({.layers = {1}, .experts = 2, .tokens = {1}}, &sum)),
              HasSubstr("have 1 values"));
}

TEST(ExpertLoad, WindowsHaveTheTokensSinceThePreviousWindow) {
  int reports = 0;
  ExpertLoadRecorder recorder({.window_s = 10, .sink = [&](const auto&) { ++reports; }});
  const Clock::time_point begin = Clock::now();
  EXPECT_FALSE(recorder.Due(begin));
  EXPECT_TRUE(recorder.Due(begin + std::chrono::seconds(11)));
  recorder.Add({.layers = {3}, .experts = 4, .tokens = {8, 0, 0, 0}}, begin);
  recorder.Add({.layers = {3}, .experts = 4, .tokens = {8, 0, 0, 0}}, begin + std::chrono::seconds(10));
  recorder.Add({.layers = {3}, .experts = 4, .tokens = {9, 3, 0, 0}}, begin + kExpertLoadHalfLife);
  const auto stats = recorder.stats();
  ASSERT_EQ(stats->windows.size(), 2U) << "a window without tokens is not kept";
  EXPECT_EQ(reports, 2);
  EXPECT_THAT(*stats->windows[0], ElementsAre(8, 0, 0, 0));
  EXPECT_THAT(*stats->windows[1], ElementsAre(1, 3, 0, 0));
  EXPECT_THAT(stats->total, ElementsAre(9, 3, 0, 0));
  EXPECT_GT(stats->Skew(0), 1);
  EXPECT_LE(stats->Skew(0), 4);
}

TEST(ExpertLoad, FailedWritesAreThoseOfTheSink) {
  int64_t errors = 0;
  const ExpertLoadRecorder recorder({.window_s = 10, .write_errors = [&] { return errors; }});
  EXPECT_EQ(recorder.write_errors(), 0);
  errors = 2;
  EXPECT_EQ(recorder.write_errors(), 2);
  EXPECT_EQ(ExpertLoadRecorder({.window_s = 10}).write_errors(), 0) << "without a file";
}

TEST(ExpertLoad, RecentTokensCountHalfAfterTheHalfLife) {
  ExpertLoadRecorder recorder({.window_s = 10});
  const Clock::time_point begin = Clock::now();
  recorder.Add({.layers = {3}, .experts = 2, .tokens = {800, 100}}, begin);
  EXPECT_THAT(recorder.stats()->recent, ElementsAre(800, 100));
  recorder.Add({.layers = {3}, .experts = 2, .tokens = {800, 104}}, begin + kExpertLoadHalfLife);
  EXPECT_THAT(recorder.stats()->recent, ElementsAre(DoubleNear(400, 1e-9), DoubleNear(54, 1e-9)));
  recorder.Add({.layers = {3}, .experts = 2, .tokens = {801, 104}}, begin + 3 * kExpertLoadHalfLife);
  EXPECT_THAT(recorder.stats()->recent, ElementsAre(DoubleNear(101, 1e-9), DoubleNear(13.5, 1e-9)));
}

TEST(ExpertLoad, JsonAddsTheTokensOfDroppedWindowsToTheFirstWindow) {
  ExpertLoadStats stats;
  stats.layers = {1, 3};
  stats.experts = 2;
  stats.total = {10, 20, 30, 40};
  for (const int64_t tokens : {1, 2}) {
    stats.windows.push_back(std::make_shared<const std::vector<int64_t>>(4, tokens));
  }
  stats.recent = {9.5, 20, 1.0 / 3, 4e7};
  EXPECT_EQ(ToJson(stats),
            "{\"layers\":[1,3],\"logical_count\":[[[8,18],[28,38]],[[2,2],[2,2]]],\"half_life_s\":300,"
            "\"recent\":[[9.5,20],[0.333333,4e+07]]}\n");
}

TEST(ExpertLoad, OldWindowsAreDropped) {
  ExpertLoadRecorder recorder({.window_s = 1});
  for (int i = 1; i <= kExpertLoadWindows + 5; ++i) {
    recorder.Add({.layers = {0}, .experts = 1, .tokens = {i}}, Clock::now());
  }
  EXPECT_EQ(std::ssize(recorder.stats()->windows), kExpertLoadWindows);
  EXPECT_EQ(recorder.stats()->all_windows, kExpertLoadWindows + 5);
}

}  // namespace
}  // namespace moesaic::engine
