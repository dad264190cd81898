#include "quantizer/preflight.h"

#include <gtest/gtest.h>

namespace moesaic::quantizer {
namespace {

// Ten units of one matrix each, of 2^20 values in bf16 and as many int8 codes.
class ForecastTest : public ::testing::Test {
 protected:
  static constexpr double kValues = 1 << 20;

  QuantizePlan Plan(Scheme scheme, int64_t unit_bytes, int fused) const {
    QuantizePlan plan;
    for (int i = 0; i < 10; ++i) {
      plan.items.push_back({.name = std::to_string(i),
                            .linear = true,
                            .shape = {1024, 1024},
                            .roundable = true,
                            .fused = fused < 0 ? -1 : i / 2});
      plan.forms.push_back({true, tensor::DType::kBF16, int64_t{2} << 20});
      plan.source_bytes += int64_t{2} << 20;
    }
    OutputSettings settings;
    settings.scheme = scheme;
    plan.output = *PlanOutput(plan.items, plan.forms, settings);
    plan.work = CutWork(plan.items, plan.forms, plan.output, {}, unit_bytes);
    return plan;
  }
  // A unit is read in `read` seconds, rounded in `round`, written in `write`.
  static MachineRates Rates(double read, double round, double write) {
    return {.read = 2 * kValues / read,
            .write = kValues / write,
            .round = kValues / round,
            .copy = 1e30,
            .direct = 1e30,
            .touch = 1e30};
  }
};

constexpr int64_t kOneMatrix = int64_t{4} << 20;

TEST_F(ForecastTest, ARunThatComputesWaitsForTheFirstReadAndTheLastWrite) {
  const QuantizePlan plan = Plan(Scheme::kW8A8, kOneMatrix, -1);
  ASSERT_EQ(plan.work.units.size(), 10U);
  const Forecast forecast = ForecastOf(plan, Rates(1, 5, 0.5), true, 1);
  EXPECT_FALSE(forecast.disk_bound);
  EXPECT_NEAR(forecast.compute_seconds, 50, 1e-6);
  EXPECT_NEAR(forecast.disk_seconds, 15, 0.1);  // and scales
  EXPECT_NEAR(forecast.seconds, 1 + 50 + 0.5, 0.1);
}

TEST_F(ForecastTest, ADiskThatIsTheBoundIsNeverIdle) {
  const QuantizePlan plan = Plan(Scheme::kW8A8, kOneMatrix, -1);
  const Forecast forecast = ForecastOf(plan, Rates(2, 0.5, 1), true, 1);
  EXPECT_TRUE(forecast.disk_bound);
  EXPECT_NEAR(forecast.seconds, 30, 0.1);  // the last but one is written while the last is rounded
  MachineRates slow = Rates(2, 0.5, 1);
  slow.together = 1.2;
  EXPECT_NEAR(ForecastOf(plan, slow, true, 1).seconds, 36, 0.1);
  MachineRates two = Rates(2, 0.5, 1);
  two.same_disk = false;
  EXPECT_NEAR(ForecastOf(plan, two, true, 1).seconds, 20 + 0.5 + 1, 0.1);
}

TEST_F(ForecastTest, WhatIsCopiedAndTouchedCounts) {
  const QuantizePlan plan = Plan(Scheme::kW8A8, kOneMatrix, -1);
  MachineRates rates = Rates(0.001, 1, 0.001);
  rates.copy = 3 * kValues;  // buffered: what is read and written is copied once, by one of two threads
  EXPECT_NEAR(ForecastOf(plan, rates, false, 2).compute_seconds, 10 + 5, 0.1);
  EXPECT_NEAR(ForecastOf(plan, rates, true, 2).compute_seconds, 10, 0.1);
  rates.direct = 6 * kValues;
  EXPECT_NEAR(ForecastOf(plan, rates, true, 2).compute_seconds, 10 + 2.5, 0.1);
  rates.direct = 1e30;
  rates.touch = static_cast<double>(plan.work.buffer_bytes());
  EXPECT_NEAR(ForecastOf(plan, rates, true, 2).compute_seconds, 10 + 0.5, 0.1);
}

// NVFP4's scale is of all linears that run as one: those that do not fit a unit are read once more, and their
// first rows wait for it.
TEST_F(ForecastTest, LinearsThatAreReadTwiceAreReadTwice) {
  MachineRates rates = Rates(1, 0.1, 0.001);
  rates.whole_scales = true;
  const QuantizePlan parted = Plan(Scheme::kNvfp4, kOneMatrix, 0);  // two matrices to a scale, one to a unit
  EXPECT_NEAR(ForecastOf(parted, rates, true, 1).disk_seconds, 20, 0.1);
  const QuantizePlan whole = Plan(Scheme::kNvfp4, 2 * kOneMatrix, 0);
  ASSERT_EQ(whole.work.units.size(), 5U);
  EXPECT_NEAR(ForecastOf(whole, rates, true, 1).disk_seconds, 10, 0.1);
  rates.whole_scales = false;
  EXPECT_NEAR(ForecastOf(parted, rates, true, 1).disk_seconds, 10, 0.1);
}

}  // namespace
}  // namespace moesaic::quantizer
