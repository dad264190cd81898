#include "proxy/protocol/json_members.h"

#include <gtest/gtest.h>

namespace moesaic::proxy {
namespace {

std::string Edited(std::string_view text, const std::function<void(JsonEdit&)>& change) {
  const StatusOr<JsonMembers> members = JsonMembers::Scan(text);
  EXPECT_TRUE(members.ok()) << members.status();
  if (!members.ok()) return "";
  JsonEdit edit(*members);
  change(edit);
  return edit.Apply();
}

TEST(JsonMembers, FindsTopLevelMembersOnly) {
  const std::string text = R"({"a" : {"model":"inner"}, "model": "outer", "n":[1,{"model":3}] })";
  const auto members = JsonMembers::Scan(text);
  ASSERT_TRUE(members.ok());
  EXPECT_EQ(members->String("model"), "outer");
  EXPECT_EQ(members->Value("n"), R"([1,{"model":3}])");
  EXPECT_EQ(members->all().size(), 3u);
  EXPECT_EQ(members->Find("inner"), nullptr);
}

TEST(JsonMembers, ReadsScalars) {
  const auto members =
      JsonMembers::Scan(R"({"s":"a\u00e9\ud83d\ude00\n","i":-7,"big":1e3,"b":true,"z":null})");
  ASSERT_TRUE(members.ok());
  EXPECT_EQ(members->String("s"), "a\xC3\xA9\xF0\x9F\x98\x80\n");
  EXPECT_EQ(members->Integer("i"), -7);
  EXPECT_EQ(members->Integer("big"), std::nullopt);
  EXPECT_EQ(members->Bool("b"), true);
  EXPECT_EQ(members->Find("z")->type, JsonType::kNull);
}

TEST(JsonMembers, ComparesUnescapedKeysAndReturnsTheLastOfEqualKeys) {
  const auto members = JsonMembers::Scan(R"({"\u006dodel":"a","model":"b"})");
  ASSERT_TRUE(members.ok());
  EXPECT_EQ(members->String("model"), "b");
}

TEST(JsonMembers, RefusesMalformedJson) {
  for (const char* text : {"",
                           "{",
                           "[",
                           "nul",
                           "{\"a\"}",
                           "{\"a\":}",
                           "{\"a\":1,}",
                           "{a:1}",
                           "{\"a\":01}",
                           "{\"a\":1.}",
                           "{\"a\":\"\x01\"}",
                           "{\"a\":\"\\q\"}",
                           "{\"a\":\"\\u12\"}",
                           "{\"a\":tru}",
                           "{\"a\":1} x",
                           "{\"a\":[1,]}",
                           "{\"a\":[1}",
                           "{\"a\":-}",
                           "\"text\"",
                           "{\"a\":{\"b\"}}",
                           "{\"a\" 1}",
                           "[1 2]"}) {
    EXPECT_FALSE(JsonMembers::Scan(text).ok()) << text;
  }
}

TEST(JsonMembers, BoundsDepth) {
  const std::string deep = "{\"a\":" + std::string(200, '[') + std::string(200, ']') + "}";
  EXPECT_FALSE(JsonMembers::Scan(deep).ok());
  EXPECT_TRUE(JsonMembers::Scan(deep, {.max_depth = 1000}).ok());
}

TEST(JsonEdit, KeepsBytesOfOtherMembers) {
  EXPECT_EQ(Edited("{ \"x\" : 1.50e+00 ,\n \"stream\" : true , \"y\":\"\\u00e9\" }",
                   [](JsonEdit& e) { e.Set("stream", "false"); }),
            "{ \"x\" : 1.50e+00 ,\n \"stream\" : false , \"y\":\"\\u00e9\" }");
}

TEST(JsonEdit, RemovesFirstMiddleAndLastMembers) {
  const char* text = R"({"a":1, "b":2, "c":3})";
  EXPECT_EQ(Edited(text, [](JsonEdit& e) { e.Remove("a"); }), R"({"b":2, "c":3})");
  EXPECT_EQ(Edited(text, [](JsonEdit& e) { e.Remove("b"); }), R"({"a":1, "c":3})");
  EXPECT_EQ(Edited(text, [](JsonEdit& e) { e.Remove("c"); }), R"({"a":1, "b":2})");
  EXPECT_EQ(Edited(text, [](JsonEdit& e) { e.Remove("b"), e.Remove("c"); }), R"({"a":1})");
  EXPECT_EQ(Edited(text, [](JsonEdit& e) { e.Remove("a"), e.Remove("b"), e.Remove("c"); }), R"({})");
}

TEST(JsonEdit, AppendsNewMembers) {
  EXPECT_EQ(Edited("{}", [](JsonEdit& e) { e.Set("a", "1"), e.Set("b", "[]"); }), R"({"a":1,"b":[]})");
  EXPECT_EQ(Edited("{\"x\":0}\n", [](JsonEdit& e) { e.Set("a", "1"); }), "{\"x\":0,\"a\":1}\n");
  EXPECT_EQ(Edited(R"({"x":0})", [](JsonEdit& e) { e.Remove("x"), e.Set("a", "1"); }), R"({"a":1})");
}

TEST(JsonEdit, LeavesOneOfDuplicateMembers) {
  EXPECT_EQ(Edited(R"({"a":1,"a":2,"b":3})", [](JsonEdit& e) { e.Set("a", "9"); }), R"({"a":9,"b":3})");
  EXPECT_EQ(Edited(R"({"a":1,"b":3,"a":2})", [](JsonEdit& e) { e.Remove("a"); }), R"({"b":3})");
}

TEST(JsonMembers, ScansTheFirstOfSeveralValues) {
  const std::string text = R"({"a":1} ,{"a":2}])";
  size_t end = 0;
  const auto first = JsonMembers::ScanFirst(text, {}, &end);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(end, 7u);
  EXPECT_EQ(first->text(), R"({"a":1})");
  JsonEdit edit(*first);
  edit.Set("b", "3");
  EXPECT_EQ(edit.Apply(), R"({"a":1,"b":3})");
  EXPECT_FALSE(JsonMembers::ScanFirst(R"( "a" )", {}, &end).ok());
}

TEST(JsonUnescaped, RefusesHalfOfASurrogatePair) {
  EXPECT_EQ(JsonUnescaped(R"(\ud83d\ude00\n\u00e9)"), "\xF0\x9F\x98\x80\n\xC3\xA9");
  for (const char* half : {R"(\ud83d)", R"(a\ude00b)", R"(\ud83d\u0041)"})
    EXPECT_FALSE(JsonUnescaped(half)) << half;
}

TEST(JsonQuoted, EscapesTextThatJsonUnquotedReadsBack) {
  const std::string text = "a\"\\\n\x01\xC3\xA9";
  EXPECT_EQ(JsonQuoted(text), "\"a\\\"\\\\\\n\\u0001\xC3\xA9\"");
  EXPECT_EQ(JsonUnquoted(JsonQuoted(text)), text);
  EXPECT_EQ(JsonUnquoted("\"\\\""), std::nullopt);
  EXPECT_EQ(JsonUnquoted("x"), std::nullopt);
}

// Strings are scanned sixteen bytes at a time.
TEST(JsonMembers, FindsTheEndOfStringsAtEveryPlace) {
  for (size_t before = 0; before < 40; ++before) {
    for (const char* special : {"\\\"", "\\\\", "\\u00e9", "\x80", "\xff", "\x7f", " ", "!"}) {
      const std::string value = '"' + std::string(before, 'x') + special + "tail of it\"";
      const std::string text = "{\"k\":" + value + ",\"n\":1}";
      const auto members = JsonMembers::Scan(text);
      ASSERT_TRUE(members.ok()) << text;
      EXPECT_EQ(members->Value("k"), value);
      EXPECT_EQ(members->Integer("n"), 1);
    }
    for (const char control : {'\0', '\n', '\x1f'}) {
      const std::string text = "{\"k\":\"" + std::string(before, 'x') + control + "tail of it\"}";
      EXPECT_FALSE(JsonMembers::Scan(text).ok()) << before;
    }
  }
}

TEST(JsonMembers, ReadsNoByteAfterAStringWithoutEnd) {
  for (size_t size = 0; size < 70; ++size) {
    const std::string text = "{\"" + std::string(size, 'a');
    const auto members = JsonMembers::Scan(text);
    ASSERT_FALSE(members.ok());
    EXPECT_NE(Message(members.status()).find("a string has no end"), std::string::npos) << members.status();
  }
}

TEST(JsonMembers, QuickScanOfCheckedTextFindsTheSameValues) {
  const std::string text = R"({"a":"\\","b":"\"","c":["x\\\"]","y"],"d":{"e\"":1}})";
  const auto full = JsonMembers::Scan(text), quick = JsonMembers::Scan(text, {.checked = true});
  ASSERT_TRUE(full.ok() && quick.ok());
  for (const char* key : {"a", "b", "c", "d"}) EXPECT_EQ(quick->Value(key), full->Value(key)) << key;
  EXPECT_EQ(quick->Value("c"), R"(["x\\\"]","y"])");
}

}  // namespace
}  // namespace moesaic::proxy
