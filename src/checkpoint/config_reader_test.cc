#include "checkpoint/config_reader.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace moesaic::checkpoint {
namespace {

using nlohmann::json;

// Reads one field with `read` and returns the message of Finish(), or "" if there is none.
template <typename Read>
std::string FaultOf(const std::string& text, Read read) {
  const json config = json::parse(text);
  ConfigReader reader(config, "config.json");
  read(reader);
  return Message(reader.Finish());
}

std::string IntFault(const std::string& value) {
  return FaultOf("{\"layers\": " + value + "}", [](ConfigReader& r) {
    const int64_t read = r.Int("layers", 1, 1024);
    EXPECT_GE(read, 1);  // a safe value for any file
    EXPECT_LE(read, 1024);
  });
}

TEST(ConfigReader, ReadsValuesWithinTheirBounds) {
  const json config = json::parse(
      R"({"a": 7, "b": 1e-6, "c": true, "d": "silu", "e": [1, 2], "f": {"x": 1}, "g": null, "h": 3})");
  ConfigReader reader(config, "config.json");
  EXPECT_EQ(reader.Int("a", 1, 7), 7);
  EXPECT_EQ(reader.Number("b", 0, 1), 1e-6);
  EXPECT_EQ(reader.Number("h", 0, 4), 3);  // an integer is also a number
  EXPECT_TRUE(reader.BoolOr("c", false));
  EXPECT_EQ(reader.StringOr("d", ""), "silu");
  EXPECT_EQ(reader.IntsOr("e", 0, 2, {}), (std::vector<int64_t>{1, 2}));
  ASSERT_NE(reader.Object("f"), nullptr);
  EXPECT_EQ(reader.IntOr("g", 0, 1, 5), 5);  // null counts as absent
  EXPECT_EQ(reader.IntOr("absent", 0, 10, 6), 6);
  EXPECT_EQ(reader.Object("absent"), nullptr);
  EXPECT_FALSE(reader.Has("g"));
  EXPECT_TRUE(reader.Finish().ok());
}

TEST(ConfigReader, RejectsIntegersOutOfRange) {
  for (const char* value : {"0", "-1", "1025", "2147483648", "9223372036854775808", "18446744073709551615",
                            "-9223372036854775808", "7.0", "1e3", "\"7\"", "true", "[7]", "{}"}) {
    const std::string message = IntFault(value);
    EXPECT_TRUE(message.starts_with("config.json: \"layers\" must be an integer in [1, 1024], found "))
        << message;
  }
  EXPECT_EQ(IntFault("0"), "config.json: \"layers\" must be an integer in [1, 1024], found 0");
  EXPECT_EQ(IntFault("null"), "config.json: \"layers\" is missing");
}

TEST(ConfigReader, RejectsNumbersOutOfRange) {
  for (const char* value : {"-1e-6", "1.5", "1e300", "-1e300", "\"NaN\"", "\"Infinity\"", "true", "[1]"}) {
    const std::string message = FaultOf(std::string("{\"eps\": ") + value + "}", [](ConfigReader& r) {
      EXPECT_EQ(r.NumberOr("eps", 0, 1, 0.5), 0.5);
    });
    EXPECT_TRUE(message.starts_with("config.json: \"eps\" must be a number in [0, 1], found ")) << message;
  }
  json config;
  config["eps"] = std::nan("");  // possible in a translated GGUF
  ConfigReader reader(config, "model.gguf");
  reader.Number("eps", 0, 1);
  EXPECT_EQ(Message(reader.Finish()), "model.gguf: \"eps\" must be a number in [0, 1], found null");
}

TEST(ConfigReader, RejectsWrongTypes) {
  EXPECT_EQ(FaultOf(R"({"x": 1})", [](ConfigReader& r) { r.BoolOr("x", true); }),
            "config.json: \"x\" must be true or false, found 1");
  EXPECT_EQ(FaultOf(R"({"x": 1})", [](ConfigReader& r) { r.StringOr("x", ""); }),
            "config.json: \"x\" must be a string, found 1");
  EXPECT_EQ(FaultOf(R"({"x": 1})", [](ConfigReader& r) { r.Object("x"); }),
            "config.json: \"x\" must be an object, found 1");
  for (const char* list : {"[1, 9]", "[-1]", "[18446744073709551615]", "[1.5]", "[true]", "3"}) {
    EXPECT_EQ(
        FaultOf(std::string("{\"x\": ") + list + "}",
                [](ConfigReader& r) { EXPECT_EQ(r.IntsOr("x", 0, 8, {4}), (std::vector<int64_t>{4})); }),
        "config.json: \"x\" must be a list of integers in [0, 8], found " + json::parse(list).dump());
  }
  const json list = json::array({1});
  ConfigReader reader(list, "config.json");
  EXPECT_EQ(reader.Int("x", 2, 3), 2);
  EXPECT_EQ(Message(reader.Finish()), "config.json: must be a JSON object, found [1]");
}

TEST(ConfigReader, RejectsUnsupportedValuesAndNamesUnreadFields) {
  EXPECT_EQ(FaultOf(R"({"act": "gelu"})", [](ConfigReader& r) { r.OnlyString("act", {"silu"}); }),
            "config.json: \"act\" must be \"silu\", found \"gelu\"");
  EXPECT_EQ(FaultOf(R"({"act": "gelu"})",
                    [](ConfigReader& r) {
                      r.OnlyString("act", {"silu", "swish"});
                    }),
            "config.json: \"act\" must be one of \"silu\", \"swish\", found \"gelu\"");
  EXPECT_EQ(FaultOf(R"({"bias": true})", [](ConfigReader& r) { r.OnlyBool("bias", false); }),
            "config.json: \"bias\" must be false, found true: not supported");
  EXPECT_EQ(FaultOf(R"({"a": 1, "dropout": 0.1, "new": 1, "off": null})",
                    [](ConfigReader& r) {
                      r.Int("a", 0, 1);
                      r.Ignore({"dropout"});
                    }),
            "config.json: unsupported field \"new\"; running the model without it could give wrong results");
}

TEST(ConfigReader, KeepsTheFirstError) {
  EXPECT_EQ(FaultOf(R"({"a": 0, "b": 0})",
                    [](ConfigReader& r) {
                      r.Int("a", 1, 2);
                      r.Fail("later");
                      r.Int("b", 1, 2);
                    }),
            "config.json: \"a\" must be an integer in [1, 2], found 0");
}

// Messages truncate large values to a few words.
TEST(ConfigReader, MessagesStayShort) {
  const int depth = 60;
  const json config = json::parse("{\"x\": " + std::string(depth, '[') + std::string(depth, ']') + "}");
  ConfigReader reader(config, "config.json");
  reader.Int("x", 0, 1);
  EXPECT_LT(Message(reader.Finish()).size(), 200U);
}

}  // namespace
}  // namespace moesaic::checkpoint
