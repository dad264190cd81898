#include "quantizer/preflight.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "quantizer/roofline.h"

namespace moesaic::quantizer {
namespace {

// Ten units of one matrix each: 2^20 values in bf16, and as many int8 codes.
class ForecastTest : public ::testing::Test {
 protected:
  static constexpr double kValues = 1 << 20;

  QuantizePlan Plan(Scheme scheme, const UnitSizes& sizes, int fused) const {
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
    plan.work = CutWork(plan.items, plan.forms, plan.output, {}, sizes);
    return plan;
  }
  // Returns rates at which a unit is read in `read` seconds, rounded in `round` and written in `write`.
  static MachineRates Rates(double read, double round, double write) {
    return {.read = 2 * kValues / read,
            .write = kValues / write,
            .round = kValues / round,
            .copy = 1e30,
            .direct = 1e30,
            .touch = 1e30};
  }
};

constexpr int64_t kTwo = int64_t{8} << 20;
constexpr UnitSizes kOneMatrix{.unit_bytes = kTwo / 2};

TEST_F(ForecastTest, ComputeBoundRunWaitsForTheFirstReadAndTheLastWrite) {
  const QuantizePlan plan = Plan(Scheme::kW8A8, kOneMatrix, -1);
  ASSERT_EQ(plan.work.units.size(), 10U);
  const Forecast forecast = ForecastOf(plan, Rates(1, 5, 0.5), true, 1);
  EXPECT_FALSE(forecast.disk_bound);
  EXPECT_NEAR(forecast.compute_seconds, 50, 1e-6);
  EXPECT_NEAR(forecast.disk_seconds, 15, 0.1);  // includes scales
  EXPECT_NEAR(forecast.seconds, 1 + 50 + 0.5, 0.1);
}

TEST_F(ForecastTest, DiskBoundRunNeverIdlesTheDisk) {
  const QuantizePlan plan = Plan(Scheme::kW8A8, kOneMatrix, -1);
  const Forecast forecast = ForecastOf(plan, Rates(2, 0.5, 1), true, 1);
  EXPECT_TRUE(forecast.disk_bound);
  EXPECT_NEAR(forecast.seconds, 30, 0.1);  // the last unit is rounded while the one before is written
  MachineRates slow = Rates(2, 0.5, 1);
  slow.together = 1.2;
  EXPECT_NEAR(ForecastOf(plan, slow, true, 1).seconds, 36, 0.1);
  MachineRates two = Rates(2, 0.5, 1);
  two.same_disk = false;
  EXPECT_NEAR(ForecastOf(plan, two, true, 1).seconds, 20 + 0.5 + 1, 0.1);
}

TEST_F(ForecastTest, CopiedAndTouchedBytesAreCounted) {
  const QuantizePlan plan = Plan(Scheme::kW8A8, kOneMatrix, -1);
  MachineRates rates = Rates(0.001, 1, 0.001);
  rates.copy = 3 * kValues;  // buffered I/O copies each byte once, on one of two threads
  EXPECT_NEAR(ForecastOf(plan, rates, false, 2).compute_seconds, 10 + 5, 0.1);
  EXPECT_NEAR(ForecastOf(plan, rates, true, 2).compute_seconds, 10, 0.1);
  rates.direct = 6 * kValues;
  EXPECT_NEAR(ForecastOf(plan, rates, true, 2).compute_seconds, 10 + 2.5, 0.1);
  rates.direct = 1e30;
  rates.touch = static_cast<double>(plan.work.buffer_bytes());
  EXPECT_NEAR(ForecastOf(plan, rates, true, 2).compute_seconds, 10 + 0.5, 0.1);
}

// The linears of a mix are rounded at the rates of their own precisions, not at the slowest one.
TEST_F(ForecastTest, RooflineUsesTheRateOfEachPrecision) {
  QuantizePlan plan = Plan(Scheme::kW8A8, kOneMatrix, -1);
  const Precision w8a8{.scheme = Scheme::kW8A8}, w4a16{.scheme = Scheme::kW4A16};
  for (size_t i = 0; i < plan.items.size(); ++i) plan.output.items[i].precision = i < 4 ? w8a8 : w4a16;
  plan.output.items[9].form = Form::kCopied;
  OutputSettings settings;
  settings.mix.options = {w8a8, w4a16};
  MachineRates rates = Rates(1, 2, 1);
  rates.rounds = {{w8a8.Name(), kValues}, {w4a16.Name(), kValues / 2}};
  EXPECT_THAT(StagesAt(plan, settings, rates, nullptr), testing::ElementsAre(testing::Pair("rounding", 14)));
}

// Under GPTQ a mix's gains are measured before the rounding, during the analysis.
TEST_F(ForecastTest, RooflineCountsHessiansInTheStageThatMakesThem) {
  QuantizePlan plan = Plan(Scheme::kW8A8, kOneMatrix, -1);
  for (ModelItem& item : plan.items) item.layer = 0;
  OutputSettings settings;
  settings.gptq = true;
  settings.calibration = {.xxh3 = "", .tokens = 1 << 14, .sequences = 8, .longest = 2048};
  CalibrationRates rates;
  rates.hessian.product = rates.factor.product = rates.round.rows.product = 1e-12;
  rates.forward = rates.forward_kept = rates.attention = 1e-12;
  const auto stages = [&] {
    const CalibrationForecast least = ForecastCalibration(plan, settings, rates);
    const auto list = StagesAt(plan, settings, {}, &least);
    return std::map<std::string, double>(list.begin(), list.end());
  };
  const auto alone = stages();
  EXPECT_GT(alone.at("hessians"), 0);
  EXPECT_GT(alone.at("factors"), 0);
  settings.mix.options = {{.scheme = Scheme::kW8A8}, {.scheme = Scheme::kW4A16}};
  const auto mixed = stages();
  for (const char* stage : {"hessians", "factors", "rounding"}) {
    EXPECT_DOUBLE_EQ(mixed.at(stage), alone.at(stage)) << stage;
  }
  EXPECT_GT(mixed.at("forward"), 2 * alone.at("forward") + alone.at("hessians") + alone.at("factors"));
}

// Eight of a layer's experts are sampled.
TEST_F(ForecastTest, MixSamplesExperts) {
  QuantizePlan plan = Plan(Scheme::kW8A8, kOneMatrix, -1);
  plan.spec.moe.experts = 80;  // every tenth is sampled, so one of these ten
  plan.spec.moe.top_k = 80;
  for (size_t i = 0; i < plan.items.size(); ++i) {
    plan.items[i].name = fmt::format("model.layers.0.mlp.experts.{}.down_proj", i);
    plan.items[i].layer = 0;
    plan.items[i].routed = true;
  }
  OutputSettings settings;
  settings.gptq = true;
  settings.calibration = {.xxh3 = "", .tokens = 1 << 14, .sequences = 8, .longest = 2048};
  settings.mix.options = {{.scheme = Scheme::kW8A8}, {.scheme = Scheme::kW4A16}};
  CalibrationRates rates;
  rates.hessian.product = rates.factor.product = 1e-12;
  const CalibrationForecast forecast = ForecastCalibration(plan, settings, rates);
  EXPECT_GT(forecast.gain_hessian_seconds, 0);
  EXPECT_NEAR(forecast.gain_hessian_seconds * 11, forecast.hessian_seconds, 1e-9);
  EXPECT_NEAR(forecast.gain_factor_seconds * 11, forecast.factor_seconds, 1e-9);
}

// NVFP4's scale covers all fused linears. Rows that do not fit the first unit are read twice, and the unit
// waits for them.
TEST_F(ForecastTest, CountsLinearsThatAreReadTwice) {
  MachineRates rates = Rates(1, 0.1, 0.001);
  rates.whole_scales = true;
  const QuantizePlan parted = Plan(Scheme::kNvfp4, kOneMatrix, 0);  // two matrices per scale, one per unit
  EXPECT_NEAR(ForecastOf(parted, rates, true, 1).disk_seconds, 15, 0.1);
  EXPECT_EQ(ForecastOf(parted, rates, true, 1).reread_bytes, int64_t{10} << 20);
  const QuantizePlan whole = Plan(Scheme::kNvfp4, {.unit_bytes = kTwo}, 0);
  ASSERT_EQ(whole.work.units.size(), 5U);
  EXPECT_NEAR(ForecastOf(whole, rates, true, 1).disk_seconds, 10, 0.1);
  rates.whole_scales = false;
  EXPECT_NEAR(ForecastOf(parted, rates, true, 1).disk_seconds, 10, 0.1);
}

// Two linears that share a scale in an exclusive unit are read once, but nothing is read while they are
// rounded.
TEST_F(ForecastTest, ExclusiveUnitsDoNotOverlap) {
  MachineRates rates = Rates(1, 0.4, 0.001);
  rates.whole_scales = true;
  const QuantizePlan alone = Plan(Scheme::kNvfp4, {.unit_bytes = kTwo / 2, .alone_bytes = kTwo}, 0);
  ASSERT_EQ(alone.work.units.size(), 5U);
  const Forecast forecast = ForecastOf(alone, rates, true, 1);
  EXPECT_EQ(forecast.reread_bytes, 0);
  EXPECT_NEAR(forecast.disk_seconds, 10, 0.1);
  EXPECT_NEAR(forecast.seconds, 5 * (2 + 0.8), 0.1);
  // Half of the second linear fits next to the first, so only the other half is read twice.
  const QuantizePlan most = Plan(Scheme::kNvfp4, {.unit_bytes = 1 << 20, .alone_bytes = kTwo / 2}, 0);
  const int64_t again = ForecastOf(most, rates, true, 1).reread_bytes;
  EXPECT_EQ(again, int64_t{5} << 20);
}

}  // namespace
}  // namespace moesaic::quantizer
