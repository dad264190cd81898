#include "server/structured.h"

#include <gtest/gtest.h>

#include "server/api_error.h"
#include "server/test_model.h"

namespace moesaic::server {
namespace {

// moesaic-tiny's 1,536 tokens use all bits of 48 words.
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

// pydantic writes "uniqueItems" for sets. A property of that name, and data, are not changed.
TEST(Structured, IgnoresUniqueItems) {
  const ServedModel model = TinyModel(text::ToolFormat::kHermes);
  const Json body =
      *ParseJson(R"({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema":
      {"type": "object", "properties": {"uniqueItems": {"type": "boolean"}, "tags": {"$ref": "#/$defs/tags"}},
       "const": {"uniqueItems": true}, "$defs": {"tags": {"type": "array", "uniqueItems": true, "items":
       {"anyOf": [{"type": "string"}, {"type": "array", "uniqueItems": false}]}}}}}}})");
  Fields fields(body, "");
  auto grammar = ReadStructured(fields);
  ASSERT_TRUE(grammar) << Message(fields.status());
  EXPECT_EQ(
      grammar->source,
      R"({"type":"object","properties":{"uniqueItems":{"type":"boolean"},"tags":{"$ref":"#/$defs/tags"}},)"
      R"("const":{"uniqueItems":true},"$defs":{"tags":{"type":"array","items":)"
      R"({"anyOf":[{"type":"string"},{"type":"array"}]}}}})");
  const char* sets =
      R"({"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"},
      "uniqueItems": true}}})";
  for (const Json& schema : {Json(sets), *ParseJson(sets)}) {
    const Json guided = {{"guided_json", schema}};
    Fields one(guided, "");
    grammar = ReadStructured(one);
    ASSERT_TRUE(grammar) << Message(one.status());
    const auto compiled = CompileGrammar(model, *grammar);
    EXPECT_TRUE(compiled.ok()) << Message(compiled.status());
  }
  Conversation conversation;
  conversation.tool_use = ToolUse::kRequired;
  conversation.tools.push_back(
      {{"type", "function"}, {"function", {{"name", "f"}, {"parameters", *ParseJson(sets)}}}});
  const auto calls = ForcedCalls(model, conversation);
  ASSERT_TRUE(calls.ok()) << Message(calls.status());
  const auto compiled = CompileGrammar(model, **calls);
  EXPECT_TRUE(compiled.ok()) << Message(compiled.status());
}

// JSON Schema calls "format" an annotation; pydantic writes "path" for pathlib.Path.
TEST(Structured, IgnoresUnknownFormats) {
  const Json body =
      *ParseJson(R"({"guided_json": {"type": "object", "required": ["format", "day"], "properties":
      {"format": {"type": "string", "format": "path"}, "day": {"type": "string", "format": "date"}}}})");
  Fields fields(body, "");
  const auto grammar = ReadStructured(fields);
  ASSERT_TRUE(grammar) << Message(fields.status());
  EXPECT_EQ(grammar->source, R"({"type":"object","required":["format","day"],"properties":)"
                             R"({"format":{"type":"string"},"day":{"type":"string","format":"date"}}})");
  const ServedModel model = TinyModel();
  const auto compiled = CompileGrammar(model, *grammar);
  EXPECT_TRUE(compiled.ok()) << Message(compiled.status());
}

// Each format that stays in a schema is one that the compiler knows.
TEST(Structured, EnforcesEveryFormatThatItKeeps) {
  const ServedModel model = TinyModel();
  for (const char* format :
       {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}) {
    Json body;
    body["guided_json"]["type"] = "string";
    body["guided_json"]["format"] = format;
    Fields fields(body, "");
    const auto grammar = ReadStructured(fields);
    ASSERT_TRUE(grammar) << Message(fields.status());
    EXPECT_NE(grammar->source.find(format), std::string::npos);
    const auto compiled = CompileGrammar(model, *grammar);
    EXPECT_TRUE(compiled.ok()) << format << ": " << Message(compiled.status());
  }
}

TEST(Structured, OnlyTheClientsFaultsNameTheField) {
  const Status refused = GrammarRefused("guided_json", InvalidArgument("it matches nothing"));
  EXPECT_EQ(Message(refused), "Invalid 'guided_json': it matches nothing");
  EXPECT_EQ(ErrorOf(refused).http_status, 400);
  EXPECT_EQ(ErrorOf(refused).param, "guided_json");
  EXPECT_EQ(ErrorOf(GrammarRefused("guided_json", ResourceExhausted("full"))).http_status, 429);
  EXPECT_TRUE(GrammarRefused("guided_json", OkStatus()).ok());
}

TEST(Structured, ReadsEveryFormOfConstraint) {
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
  EXPECT_EQ(read(R"({"structured_outputs": {"json_object": true}})"), R"({"type":"object"})");
  EXPECT_EQ(read(R"({"structured_outputs": {"json_object": false}})"), "none");
  for (const char* refused : {R"({"guided_regex": "a", "guided_choice": ["b"]})",
                              R"({"structured_outputs": {"json": {}, "json_object": true}})",
                              R"({"structured_outputs": {"structural_tag": "{}"}})"}) {
    const Json json = *ParseJson(refused);
    Fields body(json, "");
    ReadStructured(body);
    EXPECT_FALSE(body.ok()) << refused;
  }
}

}  // namespace
}  // namespace moesaic::server
