#include "app/config_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace moesaic::app {
namespace {

using testing::ElementsAre;

// Returns the values of the only setting in `text`, or the error.
std::vector<std::string> ValuesOf(std::string_view text) {
  const auto entries = ParseConfig(text);
  if (!entries.ok()) return {"refused", Message(entries.status())};
  EXPECT_EQ(entries->size(), 1) << text;
  return entries->front().values;
}

TEST(ConfigFile, ReadsLinesOfToml) {
  const auto entries = ParseConfig(
      "# ours\n\n  port = 8000   # where\r\nname='a'\napi-key = [\"one\", # first\n  'two',\n]\naccess-log "
      "=\n");
  ASSERT_TRUE(entries.ok()) << Message(entries.status());
  ASSERT_EQ(entries->size(), 4);
  EXPECT_EQ((*entries)[0].key, "port");
  EXPECT_EQ((*entries)[0].line, 3);
  EXPECT_THAT((*entries)[0].values, ElementsAre("8000"));
  EXPECT_THAT((*entries)[1].values, ElementsAre("a"));
  EXPECT_THAT((*entries)[2].values, ElementsAre("one", "two"));
  EXPECT_EQ((*entries)[3].line, 8);
  EXPECT_THAT((*entries)[3].values, ElementsAre(""));
  EXPECT_TRUE(ParseConfig("")->empty());
}

TEST(ConfigFile, CommentsBeginOutsideQuotesAndWords) {
  EXPECT_THAT(ValuesOf("k = \"a#b # c\" # d"), ElementsAre("a#b # c"));
  EXPECT_THAT(ValuesOf("k = '#'"), ElementsAre("#"));
  EXPECT_THAT(ValuesOf("k = sk-1#2=="), ElementsAre("sk-1#2=="));
  EXPECT_THAT(ValuesOf("k = sk-1 #2"), ElementsAre("sk-1"));
  EXPECT_THAT(ValuesOf("k = #2"), ElementsAre(""));
}

TEST(ConfigFile, RejectsAmbiguousLinesByNumber) {
  for (const auto& [text, words] : std::vector<std::pair<std::string, std::string>>{
           {"[server]\n", "line 1: expected KEY = VALUE, found [server]"},
           {"\nverbose\n", "line 2: expected KEY = VALUE, found verbose"},
           {"= 3", "line 1: expected KEY = VALUE, found = 3"},
           {"a = 1\nb = 2\na = 3", "line 3: \"a\" was set in line 1 already"},
           {"a = x, y", "line 1: a value with spaces, commas or brackets needs quotes: a"},
           {"a = x y", "line 1: a value with spaces, commas or brackets needs quotes: a"},
           {"a = \"x\" y", "line 1: a value with spaces, commas or brackets needs quotes: a"},
           {"a = \"x", "line 1: a closing quote is missing"},
           {"a = 'x\n'", "line 1: a closing quote is missing"},
           {"a = \"\\x41\"",
            "line 1: unknown escape; \\\" \\\\ \\n \\t \\r are supported, and '...' has no escapes"},
           {"a = [1, 2\n\n", "line 1: an array without \"]\", or a missing comma between its values"},
           {"a = [1,,2]", "line 1: a value is missing before a comma"},
           {"a = [\n,]", "line 2: a value is missing before a comma"},
           {"a = [[1]]", "line 1: an array without \"]\", or a missing comma between its values"}}) {
    EXPECT_THAT(ValuesOf(text), ElementsAre("refused", words)) << text;
  }
}

TEST(ConfigFile, ValuesRoundTrip) {
  for (const char* value : {"", "7", "-7", "0.5", ".5", "1.", "true", "truer", "a b", "a#b", "\"", "'", "\\",
                            "\\n", "\n\t\r", "[1]", "a,b", "é", "12345678901234567890"}) {
    EXPECT_THAT(ValuesOf("k = " + ConfigValue(value)), ElementsAre(value));
    EXPECT_THAT(ValuesOf("k = [" + ConfigValue(value) + "]"), ElementsAre(value));
  }
  EXPECT_EQ(ConfigValue("8000"), "8000");
  EXPECT_EQ(ConfigValue("-0.25"), "-0.25");
  EXPECT_EQ(ConfigValue("127.0.0.1"), "\"127.0.0.1\"");
  EXPECT_EQ(ConfigValue("a\"b"), "\"a\\\"b\"");
}

}  // namespace
}  // namespace moesaic::app
