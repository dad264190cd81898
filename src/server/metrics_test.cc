#include "server/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "engine/expert_balancer.h"

namespace moesaic::server {
namespace {

using testing::HasSubstr;
using testing::Not;

std::string TextOf(Metrics& metrics, const engine::ExpertBalanceStats& balance) {
  engine::EngineStats stats;
  stats.balance = std::make_shared<const engine::ExpertBalanceStats>(balance);
  return metrics.Text(stats, {});
}

TEST(ExpertBalanceMetrics, ShowTheStateTheEpochAndFailedPlans) {
  Metrics metrics("model");
  engine::ExpertBalanceStats balance;
  balance.state = "moving";
  balance.epoch = 7;
  balance.failed_plans = 2;
  std::string text = TextOf(metrics, balance);
  EXPECT_THAT(text, HasSubstr("moesaic:expert_balance_state{state=\"moving\"} 1\n"));
  for (const char* state : {"idle", "planning", "changing"})
    EXPECT_THAT(text, HasSubstr(std::string("moesaic:expert_balance_state{state=\"") + state + "\"} 0\n"));
  EXPECT_THAT(text, HasSubstr("moesaic:expert_placement_epoch 7\n"));
  EXPECT_THAT(text, HasSubstr("moesaic:expert_plans_total{result=\"failed\"} 2\n"));
  EXPECT_THAT(text, HasSubstr("moesaic:expert_plans_total{result=\"moves\"} 0\n"));

  balance.state = "idle";
  balance.epoch = 8;
  balance.failed_plans = 3;
  text = TextOf(metrics, balance);
  EXPECT_THAT(text, HasSubstr("moesaic:expert_balance_state{state=\"idle\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("moesaic:expert_balance_state{state=\"moving\"} 0\n"));
  EXPECT_THAT(text, HasSubstr("moesaic:expert_placement_epoch 8\n"));
  EXPECT_THAT(text, HasSubstr("moesaic:expert_plans_total{result=\"failed\"} 3\n"));
}

TEST(ExpertBalanceMetrics, AreAbsentWhereExpertsStay) {
  Metrics metrics("model");
  const std::string text = metrics.Text({}, {});
  EXPECT_THAT(text, Not(HasSubstr("moesaic:expert_balance_state{")));
  EXPECT_THAT(text, Not(HasSubstr("moesaic:expert_plans_total{")));
}

TEST(ExpertLoadMetrics, CountFailedWritesOfTheFile) {
  Metrics metrics("model");
  engine::EngineStats stats;
  constexpr const char* kErrors = "moesaic:expert_load_write_errors_total{model_name=\"model\"} ";
  EXPECT_THAT(metrics.Text(stats, {}), HasSubstr(std::string(kErrors) + "0\n"));
  stats.expert_load_write_errors = 3;
  EXPECT_THAT(metrics.Text(stats, {}), HasSubstr(std::string(kErrors) + "3\n"));
}

}  // namespace
}  // namespace moesaic::server
