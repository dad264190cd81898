#include "runtime/probe.h"

#include <gtest/gtest.h>

namespace moesaic::runtime {
namespace {

TEST(Probe, MeasuresAPlausibleBandwidth) {
  auto pool = ThreadPool::Create({.threads = 2, .pin = true});
  ASSERT_TRUE(pool.ok());
  const auto bandwidth = MeasureReadBandwidth(pool->get(), 8 << 20);
  ASSERT_TRUE(bandwidth.ok());
  // Between a slow disk and ten times the fastest cache: a unit error of 1000 shows.
  EXPECT_GT(bandwidth->one_thread, 1e8);
  EXPECT_LT(bandwidth->one_thread, 5e12);
  EXPECT_GT(bandwidth->all_threads, 1e8);
}

TEST(Probe, FailsWhenTheMemoryCannotBeHad) {
  auto pool = ThreadPool::Create({.threads = 1, .pin = false});
  EXPECT_EQ(MeasureReadBandwidth(pool->get(), int64_t{1} << 60).status().code(),
            StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace moesaic::runtime
