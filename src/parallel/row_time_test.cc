#include "parallel/row_time.h"

#include <gtest/gtest.h>

namespace moesaic::parallel {
namespace {

TEST(RowTime, TheFirstBatchesDoNotCount) {
  RowTime time;
  for (int i = 0; i < RowTime::kColdBatches; ++i) {
    time.Add(100, 1);
    EXPECT_EQ(time.seconds(), 0);
  }
  time.Add(100, 1e-3);
  EXPECT_DOUBLE_EQ(time.seconds(), 1e-5);
}

TEST(RowTime, FollowsALastingChange) {
  RowTime time;
  for (int i = 0; i < 100; ++i) time.Add(100, 1e-3);
  for (int i = 0; i < 100; ++i) time.Add(50, 1e-3);
  EXPECT_NEAR(time.seconds(), 2e-5, 0.02e-5);
}

TEST(RowTime, IsUnknownAfterManyBatchesWithoutRows) {
  RowTime time;
  for (int i = 0; i < 2 * RowTime::kColdBatches; ++i) time.Add(100, 1e-3);
  for (int i = 1; i < RowTime::kMaxSkipped; ++i) time.Skip();
  EXPECT_GT(time.seconds(), 0);
  time.Skip();
  EXPECT_EQ(time.seconds(), 0);
}

TEST(RowTime, ColdBatchesCountOnce) {
  RowTime time;
  for (int i = 0; i < RowTime::kColdBatches; ++i) time.Add(100, 1);
  for (int i = 0; i < RowTime::kMaxSkipped; ++i) time.Skip();
  time.Add(100, 1e-3);
  EXPECT_DOUBLE_EQ(time.seconds(), 1e-5);
}

}  // namespace
}  // namespace moesaic::parallel
