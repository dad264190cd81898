#include "server/structured.h"

#include <gtest/gtest.h>

#include "server/test_model.h"

namespace moesaic::server {
namespace {

// moesaic-tiny's 1,536 tokens fill 48 words to the last bit.
TEST(Structured, MasksHaveABitForEachToken) {
  const ServedModel model = TinyModel(text::ToolFormat::kHermes);
  ASSERT_EQ(model.tokenizer.vocab_size() % 32, 0);
  text::Grammar grammar =
      CompileGrammar(model, {text::GrammarKind::kRegex, "[0-9]{3}", "guided_regex"}).value();
  std::vector<uint32_t> mask(model.tokenizer.vocab_size() / 32);
  ASSERT_TRUE(grammar.ComputeMask(mask).ok());
  const int32_t seven = model.tokenizer.TokenToId("7").value();
  EXPECT_TRUE(mask[seven / 32] >> (seven % 32) & 1);
}

TEST(Structured, ReadsEveryWayToSayIt) {
  const auto read = [](const char* text) {
    const Json json = *ParseJson(text);
    Fields body(json, "");
    const auto grammar = ReadStructured(body);
    EXPECT_TRUE(body.ok()) << Message(body.status());
    return grammar ? grammar->source : "none";
  };
  EXPECT_EQ(read("{}"), "none");
  EXPECT_EQ(read(R"({"response_format": {"type": "text"}})"), "none");
  EXPECT_EQ(read(R"({"response_format": {"type": "json_object"}})"), R"({"type":"object"})");
  EXPECT_EQ(
      read(
          R"({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"z": 1, "a": 2}}}})"),
      R"({"z":1,"a":2})");
  EXPECT_EQ(read(R"({"guided_regex": "a+"})"), "a+");
  EXPECT_EQ(read(R"({"guided_choice": ["a\"", "b"]})"), R"(start: "a\"" | "b")");
  EXPECT_EQ(read(R"({"structured_outputs": {"json": "{}"}})"), "{}");
  const Json both = *ParseJson(R"({"guided_regex": "a", "guided_choice": ["b"]})");
  Fields body(both, "");
  ReadStructured(body);
  EXPECT_FALSE(body.ok());
}

}  // namespace
}  // namespace moesaic::server
