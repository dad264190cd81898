#include "app/sampling_flags.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace moesaic::app {
namespace {

engine::SamplingParams Resolved(const SamplingFlags& flags, const char* generation) {
  const auto sampling = ResolveSampling(flags, nlohmann::json::parse(generation));
  EXPECT_TRUE(sampling.ok()) << sampling.status();
  return *sampling;
}

TEST(SamplingFlagsTest, FlagsOverrideTheModelsDefaults) {
  SamplingFlags flags;
  EXPECT_FLOAT_EQ(Resolved(flags, "{}").temperature, 0.7f);
  EXPECT_FLOAT_EQ(Resolved(flags, R"({"temperature": 0.3, "top_k": 20, "top_p": null})").temperature, 0.3f);
  EXPECT_EQ(Resolved(flags, R"({"temperature": 0.3, "top_k": 20})").top_k, 20);
  EXPECT_EQ(Resolved(flags, R"({"temperature": 0.3, "do_sample": false})").temperature, 0);
  flags.temperature = 1.5f;
  EXPECT_FLOAT_EQ(Resolved(flags, R"({"temperature": 0.3, "do_sample": false})").temperature, 1.5f);
}

TEST(SamplingFlagsTest, TheServersDefaultTemperatureIs1LikeThatOfOpenAi) {
  const auto temperature = [](const char* generation) {
    return ResolveSampling({}, nlohmann::json::parse(generation), kServerTemperature)->temperature;
  };
  EXPECT_FLOAT_EQ(temperature("{}"), 1);
  EXPECT_FLOAT_EQ(temperature(R"({"temperature": null})"), 1);
  EXPECT_FLOAT_EQ(temperature(R"({"temperature": 0.3})"), 0.3f);
  EXPECT_FLOAT_EQ(temperature(R"({"do_sample": false})"), 0);
}

TEST(SamplingFlagsTest, ReadsMaxNewTokens) {
  EXPECT_EQ(*MaxNewTokens(nlohmann::json::parse(R"({"max_new_tokens": 64})")), 64);
  EXPECT_EQ(*MaxNewTokens(nlohmann::json::parse(R"({"max_new_tokens": null})")), std::nullopt);
  EXPECT_EQ(*MaxNewTokens(nlohmann::json::object()), std::nullopt);
  for (const char* wrong : {"0", "-1", "1.5", "\"64\"", "3000000000"}) {
    EXPECT_EQ(Message(MaxNewTokens({{"max_new_tokens", nlohmann::json::parse(wrong)}}).status()),
              fmt::format(R"(generation_config.json: "max_new_tokens" must be a positive integer, found {})",
                          wrong));
  }
}

TEST(SamplingFlagsTest, RefusesAGenerationConfigByField) {
  EXPECT_EQ(Message(ResolveSampling({}, nlohmann::json::parse(R"({"top_p": "high"})")).status()),
            "generation_config.json: \"top_p\" must be a number, found \"high\"");
  EXPECT_FALSE(ResolveSampling({}, nlohmann::json::parse(R"({"top_p": 2})")).ok());
}

TEST(SamplingFlagsTest, SetChangesOneParameterOrNothing) {
  engine::SamplingParams sampling;
  EXPECT_TRUE(SetSampling("temperature", "0.25", &sampling).ok());
  EXPECT_FLOAT_EQ(sampling.temperature, 0.25f);
  EXPECT_TRUE(SetSampling("top_k", "7", &sampling).ok());
  EXPECT_EQ(sampling.top_k, 7);
  EXPECT_TRUE(SetSampling("seed", "9", &sampling).ok());
  EXPECT_EQ(sampling.seed, 9U);
  EXPECT_TRUE(SetSampling("seed", "none", &sampling).ok());
  EXPECT_FALSE(sampling.seed.has_value());
  EXPECT_FALSE(SetSampling("top_p", "1.5", &sampling).ok());
  EXPECT_FALSE(SetSampling("top_p", "much", &sampling).ok());
  EXPECT_FALSE(SetSampling("luck", "1", &sampling).ok());
  EXPECT_FLOAT_EQ(sampling.top_p, 1);
}

TEST(SamplingFlagsTest, SeedsAreWholeNumbersOf64Bits) {
  engine::SamplingParams sampling;
  EXPECT_TRUE(SetSampling("seed", "18446744073709551615", &sampling).ok());
  EXPECT_EQ(sampling.seed, std::numeric_limits<uint64_t>::max());
  for (const char* wrong : {"-1", "18446744073709551616", "1.5", "", "x"}) {
    EXPECT_EQ(
        Message(SetSampling("seed", wrong, &sampling)),
        std::string("seed must be a whole number from 0 to 18446744073709551615, found \"") + wrong + "\"");
  }
}

}  // namespace
}  // namespace moesaic::app
