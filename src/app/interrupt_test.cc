#include "app/interrupt.h"

#include <gtest/gtest.h>

#include <csignal>

namespace moesaic::app {
namespace {

TEST(InterruptGuard, TerminatingSignalsSetTheFlag) {
  const InterruptGuard guard;
  for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
    EXPECT_FALSE(Interrupted());
    std::raise(number);
    EXPECT_TRUE(Interrupted());
    EXPECT_EQ(LastSignal(), number);
    ClearInterrupt();
  }
}

TEST(InterruptGuard, IgnoredHangUpStaysIgnoredAndHandlersAreRestored) {
  std::signal(SIGHUP, SIG_IGN);
  {
    const InterruptGuard guard;
    std::raise(SIGHUP);
    EXPECT_FALSE(Interrupted());
  }
  EXPECT_EQ(std::signal(SIGHUP, SIG_DFL), SIG_IGN);
  EXPECT_EQ(std::signal(SIGTERM, SIG_DFL), SIG_DFL);
}

TEST(InterruptGuard, ReloadingHangUpInterruptsNothing) {
  std::signal(SIGHUP, SIG_IGN);  // reloads even under nohup
  {
    const InterruptGuard guard(HangUp::kReloads);
    EXPECT_FALSE(TakeReload());
    for (int i = 0; i < 5; ++i) std::raise(SIGHUP);
    EXPECT_FALSE(Interrupted());
    EXPECT_TRUE(TakeReload());
    EXPECT_FALSE(TakeReload());
  }
  EXPECT_EQ(std::signal(SIGHUP, SIG_DFL), SIG_IGN);
}

}  // namespace
}  // namespace moesaic::app
