#include "engine/event_rate.h"

#include <gtest/gtest.h>

namespace moesaic::engine {
namespace {

class EventRateTest : public testing::Test {
 protected:
  void After(double seconds) {
    now_ += std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    rate_.Count(now_);
  }

  EventRate rate_;
  Clock::time_point now_;
};

TEST_F(EventRateTest, IsUnknownBeforeTheSecondEvent) {
  EXPECT_EQ(rate_.seconds_between(), 0);
  After(5);
  EXPECT_EQ(rate_.seconds_between(), 0);
  After(3);
  EXPECT_DOUBLE_EQ(rate_.seconds_between(), 3);
}

TEST_F(EventRateTest, AveragesBursts) {
  for (int burst = 0; burst < 100; ++burst) {
    After(32);
    for (int i = 1; i < 64; ++i) After(0);
  }
  EXPECT_NEAR(rate_.seconds_between(), 0.5, 0.3);  // at least 32 x e^-1 / 64 after a burst
}

TEST_F(EventRateTest, LimitsTheWeightOfLongPauses) {
  for (int i = 0; i < 200; ++i) After(2);
  After(8 * 3600);
  EXPECT_NEAR(rate_.seconds_between(), 2 + 58.0 / 64, 1e-6);
  for (int i = 0; i < 64; ++i) After(2);
  EXPECT_NEAR(rate_.seconds_between(), 2, 0.4);
}

}  // namespace
}  // namespace moesaic::engine
