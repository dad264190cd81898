#include "server/json_fields.h"

#include <gtest/gtest.h>

#include "server/api_error.h"

namespace moesaic::server {
namespace {

TEST(ParseJson, AcceptsTheTextsOfTheStandard) {
  for (const char* text :
       {"{}", " [1, -0.5e+3, true, null, \"\\u00e9\\ud83d\\ude00\"]\n", "\"x\"", "0", "{\"a\":{\"a\":[]}}"}) {
    EXPECT_TRUE(ParseJson(text).ok()) << text;
  }
}

TEST(ParseJson, RefusesMalformedTexts) {
  for (const char* text :
       {"", "{", "[1,]", "{\"a\"}", "01", "+1", ".5", "1.", "NaN", "'a'", "\"\x01\"", "\"\xff\"",
        "\"\xc0\xaf\"", "\"\xed\xa0\x80\"", "\"\\ud800\"", "[] []", "// c\n[]", "1e999", "\"a\nb\""}) {
    const auto parsed = ParseJson(text);
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_EQ(ErrorOf(parsed.status()).http_status, 400);
    EXPECT_EQ(ErrorOf(parsed.status()).code, "invalid_json");
  }
  EXPECT_FALSE(ParseJson(std::string_view("[]\0", 3)).ok());
}

TEST(ParseJson, BoundsDepthAndMembers) {
  const auto nested = [](int depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_TRUE(ParseJson(nested(64)).ok());
  EXPECT_FALSE(ParseJson(nested(65)).ok());
  EXPECT_FALSE(ParseJson(std::string(1'000'000, '[')).ok());
  const auto wide = [](int members) {
    std::string text = "{";
    for (int i = 0; i < members; ++i) text += fmt::format("{}\"k{}\":[{}]", i == 0 ? "" : ",", i, "1,2,3");
    return text + "}";
  };
  EXPECT_TRUE(ParseJson(wide(1024)).ok());
  EXPECT_FALSE(ParseJson(wide(1025)).ok());
  EXPECT_TRUE(ParseJson("\"" + std::string(5000, '[') + "\"").ok());  // brackets in strings do not nest
}

TEST(Fields, NamesTheFirstFault) {
  const Json json = *ParseJson(R"({"a": "x", "b": 1, "c": null, "d": [1, "y"], "e": 5000000000})");
  const auto fault = [&json](auto read) {
    Fields fields(json, "outer");
    read(fields);
    return ErrorOf(fields.status());
  };
  bool flag = true;
  int number = 7;
  std::vector<std::string> strings;
  EXPECT_EQ(fault([&](Fields& f) { f.Bool("a", &flag); }).param, "outer.a");
  EXPECT_EQ(fault([&](Fields& f) { f.Bool("a", &flag); }).message,
            "Invalid type for 'outer.a': expected a boolean, but got a string instead.");
  EXPECT_EQ(fault([&](Fields& f) { f.Int("e", 0, 10, &number); }).code, "invalid_value");
  EXPECT_EQ(fault([&](Fields& f) { f.Strings("d", 5, &strings); }).param, "outer.d[0]");
  EXPECT_EQ(fault([&](Fields& f) {
              f.Int("b", 5, 10, &number);
              f.Bool("a", &flag);
            }).param,
            "outer.b");
  EXPECT_EQ(number, 7);
  Fields fields(json, "");
  fields.Int("c", 0, 1, &number);
  fields.Int("z", 0, 1, &number);
  EXPECT_TRUE(fields.ok());
  EXPECT_EQ(number, 7);
  EXPECT_FALSE(Fields(Json::array(), "").ok());
}

TEST(Errors, HaveTheFormatOfTheirApi) {
  const ApiError error = ErrorOf(FieldError("top_p", "invalid_value", "too much"));
  EXPECT_EQ(
      ErrorJson(error, ApiStyle::kOpenAi),
      R"({"error":{"message":"too much","type":"invalid_request_error","param":"top_p","code":"invalid_value"}})");
  EXPECT_EQ(ErrorJson(error, ApiStyle::kAnthropic),
            R"({"type":"error","error":{"type":"invalid_request_error","message":"top_p: too much"}})");
  const HttpResponse full = ErrorResponse(ErrorOf(ResourceExhausted("full")), ApiStyle::kOpenAi);
  EXPECT_EQ(full.status, 429);
  EXPECT_EQ(full.headers.back(), (std::pair<std::string, std::string>("retry-after", "1")));
}

// JSON's numbers have no bounds. Integers of 64 bits stay numbers, and wider ones keep their digits.
TEST(Json, KeepsTheDigitsOfWideIntegers) {
  const std::string text =
      R"({"a":[18446744073709551615,18446744073709551616,-9223372036854775809],"b":{"c":123456789012345678901234567890}})";
  const Json json = *ParseJson(text);
  EXPECT_EQ(Dump(json), text);
  EXPECT_EQ(DumpSpaced(*ParseJson(R"({"a":[1,2.5,"x: ,"],"b":{}})")), R"({"a": [1, 2.5, "x: ,"], "b": {}})");
  Fields fields(json, "");
  int64_t value = 0;
  fields.Int("b", 0, 1, &value);
  EXPECT_FALSE(fields.ok());
  const Json wide = *ParseJson(R"({"n": 123456789012345678901234567890})");
  Fields one(wide, "");
  one.Int("n", 0, 1, &value);
  EXPECT_EQ(Message(one.status()),
            "Invalid type for 'n': expected an integer, but got an integer of more than 64 bits instead.");
}

}  // namespace
}  // namespace moesaic::server
