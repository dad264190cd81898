// Tests the precision groups of a mix, their patterns in a configuration, and the choice under a budget.
#include "quantizer/mixed/mix.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>

#include "checkpoint/linear_source.h"
#include "models/test_session.h"

namespace moesaic::quantizer {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Kind = MixBudget::Kind;

Precision P(const char* name) { return *ParsePrecision(name); }

PrecisionGroup UnitOf(const std::string& name, int64_t weights, double sensitivity) {
  PrecisionGroup unit{
      .name = name, .layer = LayerOf(name), .weights = weights, .measured = true, .options = {}};
  unit.options.push_back(
      {.precision = P("nvfp4"), .bytes = weights / 2, .header_bytes = 200, .loss = sensitivity});
  unit.options.push_back(
      {.precision = P("w8a8"), .bytes = weights, .header_bytes = 200, .loss = sensitivity / 100});
  unit.options.push_back({.precision = P("bf16"), .bytes = 2 * weights, .header_bytes = 100, .loss = 0});
  return unit;
}

Mix Three() {
  Mix mix;
  mix.units = {UnitOf("model.layers.0.mlp", 1000, 1), UnitOf("model.layers.1.mlp.experts", 10'000, 2),
               UnitOf("model.layers.10.self_attn.o_proj", 1000, 30)};
  return mix;
}

MixSettings Settings(Kind kind, double amount) {
  return {.options = {P("nvfp4"), P("w8a8"), P("bf16")}, .budget = {kind, amount}};
}

std::vector<std::string> Chosen(const Mix& mix) {
  std::vector<std::string> names;
  for (const PrecisionGroup& unit : mix.units) names.push_back(unit.options[unit.chosen].precision.Name());
  return names;
}

TEST(Mix, FusedLinearsShareAPrecisionGroup) {
  const std::string layer = "model.layers.12.";
  for (const auto& [module, unit] :
       {std::pair("mlp.experts.3.up_proj", "mlp.experts"),
        std::pair("mlp.experts.255.down_proj", "mlp.experts"),
        std::pair("mlp.shared_experts.gate_proj", "mlp.shared_experts"), std::pair("mlp.down_proj", "mlp"),
        std::pair("self_attn.q_proj", "self_attn.qkv_proj"),
        std::pair("self_attn.v_proj", "self_attn.qkv_proj"),
        std::pair("self_attn.kv_a_proj_with_mqa", "self_attn.qkv_a_proj"),
        std::pair("self_attn.q_b_proj", "self_attn.q_b_proj"),
        std::pair("self_attn.o_proj", "self_attn.o_proj")}) {
    EXPECT_EQ(PrecisionGroupOf(layer + module), layer + unit);
  }
}

class MixPatternsTest : public ::testing::TestWithParam<const char*> {};

TEST_P(MixPatternsTest, MatchTheirGroupsAndNoOthers) {
  const auto source =
      *checkpoint::Checkpoint::Open(models::SourcePath(std::string("tests/golden/") + GetParam()));
  const std::vector<ModelItem> items = *ListItems(*source);
  std::set<std::string> units;
  for (const ModelItem& item : items) {
    if (item.roundable) units.insert(PrecisionGroupOf(item.name));
  }
  EXPECT_GE(units.size(), 6U);
  for (const std::string& unit : units) {
    const auto patterns =
        *checkpoint::ModulePatterns::Parse(MixPatterns(std::vector<std::string>{unit}), "test");
    for (const ModelItem& item : items) {
      if (!item.linear) continue;
      EXPECT_EQ(patterns.MatchName(item.name), item.roundable && PrecisionGroupOf(item.name) == unit)
          << item.name << " " << unit;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, MixPatternsTest,
                         ::testing::Values("kimi-k2", "deepseek-v3-noqlora", "qwen3-moe-norm-tied",
                                           "deepseek-v3-mtp", "llama3-rope-bias"),
                         [](const auto& test) { return models::TestName(test.param); });

TEST(Mix, LayersOfOneKindShareAPattern) {
  const std::vector<std::string> units = {"model.layers.10.mlp", "model.layers.2.mlp",
                                          "model.layers.3.self_attn.o_proj"};
  EXPECT_THAT(MixPatterns(units), ElementsAre(R"(re:model\.layers\.(2|10)\.mlp\.(gate|up|down)_proj$)",
                                              R"(re:model\.layers\.(3)\.self_attn\.o_proj$)"));
}

TEST(Mix, BudgetIsSpentWhereLossFallsMost) {
  Mix mix = Three();
  // 12,000 weights need at least 6,000 bytes. 500 more give int8 to the most sensitive of the small groups.
  ASSERT_TRUE(ChooseMix(Settings(Kind::kBitsPerWeight, 8.0 * 6500 / 12'000 + 0.001), {}, &mix).ok());
  EXPECT_THAT(Chosen(mix), ElementsAre("nvfp4", "nvfp4", "w8a8"));
  EXPECT_EQ(mix.bytes, 6500);
  EXPECT_NEAR(mix.loss, 1 + 2 + 0.3, 1e-12);
  EXPECT_TRUE(mix.exact);
  // The next byte lowers the loss most in the first group.
  EXPECT_NEAR(mix.price, 0.99 / 500, 1e-12);
}

TEST(Mix, BudgetOfBytesIncludesHeaders) {
  for (const int64_t fixed : {0, 5000}) {
    Mix mix = Three();
    // Cost of the cheapest mix with headers, plus 499 or 500.
    const auto budget = static_cast<double>(fixed + 6000 + 600);
    ASSERT_TRUE(ChooseMix(Settings(Kind::kBytes, budget + 499), {.bytes = fixed}, &mix).ok());
    EXPECT_THAT(Chosen(mix), ElementsAre("nvfp4", "nvfp4", "nvfp4"));
    ASSERT_TRUE(ChooseMix(Settings(Kind::kBytes, budget + 500), {.bytes = fixed}, &mix).ok());
    EXPECT_THAT(Chosen(mix), ElementsAre("nvfp4", "nvfp4", "w8a8"));
  }
}

TEST(Mix, GroupsWithoutLossTakeTheFewestBytes) {
  // An MTP module has no loss.
  for (const bool reversed : {false, true}) {
    Mix mix = Three();
    for (MixOption& option : mix.units[0].options) option.loss = 0;
    if (reversed) std::ranges::reverse(mix.units[0].options);
    ASSERT_TRUE(ChooseMix(Settings(Kind::kBytes, 1e6), {}, &mix).ok());
    EXPECT_THAT(Chosen(mix), ElementsAre("nvfp4", "bf16", "bf16"));
  }
}

TEST(Mix, TooSmallBudgetIsRejectedWithTheMinimum) {
  Mix mix = Three();
  EXPECT_THAT(
      Message(ChooseMix(Settings(Kind::kBitsPerWeight, 3.5), {}, &mix)),
      HasSubstr(
          "--bits-per-weight 3.5 is too little: the cheapest mix of nvfp4, w8a8, bf16 takes 4.0000 bits"));
  EXPECT_THAT(
      Message(ChooseMix(Settings(Kind::kBytes, 10'000), {.bytes = 4000}, &mix)),
      HasSubstr(
          "--budget 10000 is too little: the cheapest mix of nvfp4, w8a8, bf16 takes 10600 bytes, 4000 of "
          "them for tensors that are kept"));
}

TEST(Mix, OverflowingOptionsAreNotChosen) {
  Mix mix = Three();
  mix.units[1].options[0].loss = std::numeric_limits<double>::infinity();
  ASSERT_TRUE(ChooseMix(Settings(Kind::kBitsPerWeight, 16), {}, &mix).ok());
  EXPECT_THAT(Chosen(mix), ElementsAre("bf16", "bf16", "bf16"));
  EXPECT_THAT(Message(ChooseMix(Settings(Kind::kBitsPerWeight, 4), {}, &mix)),
              HasSubstr("takes 7.3333 bits"));
  for (MixOption& option : mix.units[1].options) option.loss = std::numeric_limits<double>::infinity();
  EXPECT_THAT(Message(ChooseMix(Settings(Kind::kBitsPerWeight, 16), {}, &mix)),
              HasSubstr("model.layers.1.mlp.experts: none of nvfp4, w8a8, bf16 is possible (the model's "
                        "predictions are not finite)"));
  for (MixOption& option : mix.units[1].options) option.largest = 1e5;
  EXPECT_THAT(Message(ChooseMix(Settings(Kind::kBitsPerWeight, 16), {}, &mix)),
              HasSubstr("(fp16 overflows)"));
}

TEST(Mix, RoutersAreKeptIfTheirBytesAreWorthTheLoss) {
  Mix mix = Three();
  mix.routers = {{.layer = 1, .precision = P("nvfp4"), .loss = 1.0, .saved = 100},
                 {.layer = 2, .precision = P("nvfp4"), .loss = 0.1, .saved = 100}};
  ASSERT_TRUE(ChooseMix(Settings(Kind::kBitsPerWeight, 4), {}, &mix).ok());
  // The next byte would lower the loss by 29.7 / 500. 100 bytes are worth 5.94, more than the loss of either
  // router.
  EXPECT_FALSE(mix.routers[0].kept);
  ASSERT_TRUE(ChooseMix(Settings(Kind::kBitsPerWeight, 8.0 * 6500 / 12'000 + 0.001), {}, &mix).ok());
  EXPECT_TRUE(mix.routers[0].kept);  // 0.99 / 500 now: 0.198
  EXPECT_FALSE(mix.routers[1].kept);
}

TEST(Mix, JsonRoundTrips) {
  Mix mix = Three();
  mix.tokens = 2048;
  mix.units[2].options[0].loss = std::numeric_limits<double>::infinity();
  mix.units[2].options[0].largest = 1e5;
  mix.units[2].options[1].largest = std::numeric_limits<double>::infinity();
  mix.routers = {
      {.layer = 1, .precision = P("w8a8"), .loss = 0.5, .flips = 0.25, .saved = 10, .kept = false}};
  ASSERT_TRUE(ChooseMix(Settings(Kind::kBitsPerWeight, 6), {}, &mix).ok());
  const StatusOr<Mix> read = Mix::FromJson(nlohmann::ordered_json::parse(mix.Json().dump()));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(read->Json().dump(), mix.Json().dump());
  EXPECT_EQ(read->Choice(), mix.Choice());
  EXPECT_EQ(read->units[2].options[0].loss, mix.units[2].options[0].loss);
  EXPECT_EQ(read->units[2].options[0].largest, 1e5);
  EXPECT_TRUE(std::isinf(read->units[2].options[1].largest));
  EXPECT_FALSE(read->units[2].options[2].overflows());
}

TEST(Mix, SettingsRoundTrip) {
  for (const Kind kind : {Kind::kBitsPerWeight, Kind::kBytes}) {
    MixSettings settings = Settings(kind, 4.5);
    settings.options.push_back(P("w4a16-g128"));
    settings.options.push_back(P("fp16"));
    const StatusOr<MixSettings> read = MixSettings::FromJson(nlohmann::json::parse(settings.Json().dump()));
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->options, settings.options);
    EXPECT_EQ(read->budget.kind, kind);
    EXPECT_EQ(read->Json(), settings.Json());
  }
  EXPECT_FALSE(MixSettings::FromJson({{"options", {"nvfp4", "int3"}}, {"tokens", 1}, {"bytes", 1}}).ok());
  EXPECT_FALSE(MixSettings::FromJson({{"options", {"nvfp4"}}, {"tokens", 1}}).ok()) << "no budget";
}

}  // namespace
}  // namespace moesaic::quantizer
