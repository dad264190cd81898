// Log lines of the engine for operators.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <spdlog/sinks/ostream_sink.h>
#include <spdlog/spdlog.h>

#include <sstream>

#include "engine/engine.h"
#include "engine/event_limit.h"
#include "engine/fake_engine.h"

namespace moesaic::engine {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

TEST(EventLimitTest, OneLineReportsTheEventsOfAnInterval) {
  EventLimit limit;
  const Clock::time_point start = Clock::now();
  EXPECT_EQ(limit.Count(0, start), 0);
  EXPECT_EQ(limit.Count(2, start), 2);
  EXPECT_EQ(limit.Count(3, start), 0);
  EXPECT_EQ(limit.Count(4, start + EventLimit::kInterval - Clock::duration(1)), 0);
  EXPECT_EQ(limit.Count(0, start + EventLimit::kInterval), 7);
  EXPECT_EQ(limit.Count(0, start + 9 * EventLimit::kInterval), 0);
}

class LogLinesTest : public FakeEngineTest {
 protected:
  LogLinesTest() : FakeEngineTest(512) {
    spdlog::set_default_logger(
        std::make_shared<spdlog::logger>("", std::make_shared<spdlog::sinks::ostream_sink_mt>(log_)));
  }
  ~LogLinesTest() override { spdlog::set_default_logger(before_); }

  // Runs four requests that need 16 blocks in a cache of 8.
  std::string LogOf(spdlog::level::level_enum level, EngineOptions options) {
    spdlog::default_logger()->set_level(level);
    options.kv_bytes = 8 * kBlockBytes;
    options.max_sequences = 4;
    const auto engine = Make(options);
    for (uint32_t i = 0; i < 4; ++i) {
      EXPECT_TRUE(engine->Add(MakeRequest(RandomPrompt(60, i), 190, 0)).ok());
    }
    Drain(*engine);
    EXPECT_GT(engine->stats().preemptions, 0);
    restores_ = engine->stats().swapped_in > 0;
    return log_.str();
  }

  bool restores_ = false;  // the last run restored blocks from the swap space

 private:
  std::ostringstream log_;
  std::shared_ptr<spdlog::logger> before_ = spdlog::default_logger();
};

TEST_F(LogLinesTest, PreemptionsAreReportedOnceInAnInterval) {
  const std::string log = LogOf(spdlog::level::info, {});
  EXPECT_THAT(log,
              ContainsRegex("the KV cache is full: preempted [0-9]+ requests, [0-9]+ run and [0-9]+ wait"));
  EXPECT_THAT(log, Not(HasSubstr("slow step")));
  EXPECT_THAT(log, Not(HasSubstr("engine request")));
}

TEST_F(LogLinesTest, SlowStepsAreReported) {
  EXPECT_THAT(LogOf(spdlog::level::info, {.slow_step_seconds = 0}),
              ContainsRegex("slow step: [0-9.]+ s for [0-9]+ prompt tokens and [0-9]+ other rows of [0-9]+ "
                            "requests; 1 slow steps since the last report"));
}

TEST_F(LogLinesTest, DebugLinesFollowARequestThroughPreemptionAndSwapping) {
  model_.row_time = std::chrono::microseconds(20);  // longer than copying a block
  const std::string log = LogOf(spdlog::level::debug, {.swap_bytes = 8 * kBlockBytes});
  for (const char* line : {"engine request [0-9]+: admitted with 0 of 60 tokens cached, [0-9]+ still wait",
                           "engine request [0-9]+: preempted with [0-9]+ of [0-9]+ tokens computed",
                           // The speed of the machine decides which.
                           "swap: engine request [0-9]+: (parked [0-9]+ blocks, [0-9]+ of 8 slots are used|"
                           "computing [0-9]+ tokens again is faster than copying them)",
                           "engine request [0-9]+: resumed with [0-9]+ of [0-9]+ tokens cached",
                           "evicted [0-9]+ blocks of the prefix cache, [0-9]+ are idle"}) {
    EXPECT_THAT(log, ContainsRegex(line));
  }
  EXPECT_EQ(log.find(": restoring ") != std::string::npos, restores_);
}

}  // namespace
}  // namespace moesaic::engine
