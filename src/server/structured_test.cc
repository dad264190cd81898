#include "server/structured.h"

#include <gtest/gtest.h>

#include "server/tool_grammar.h"

namespace moesaic::server {
namespace {

// moesaic-tiny's own tokenizer, with the special tokens that some formats frame calls with.
ServedModel Model(text::ToolFormat format) {
  const auto folder = std::string(MOESAIC_SOURCE_DIR) + "/models/moesaic-tiny";
  auto tokenizer = text::Tokenizer::FromFolder(folder).value();
  const std::vector<int32_t> ends = {2};
  auto grammars = text::GrammarCompiler::Create(tokenizer, ends).value();
  ServedModel model{.names = {"m"},
                    .tokenizer = std::move(tokenizer),
                    .chat = {},
                    .grammars = std::move(grammars),
                    .defaults = {}};
  model.tools = format;
  return model;
}

Conversation Asks(ToolUse use, const char* name = "") {
  Conversation conversation;
  conversation.tools = *ParseJson(R"([
    {"type": "function", "function": {"name": "get", "parameters":
      {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}},
    {"type": "function", "function": {"name": "stop"}}])");
  conversation.tool_use = use;
  conversation.tool_name = name;
  return conversation;
}

// Whether `text` is a whole output under the grammar.
bool Takes(const ServedModel& model, const Conversation& conversation, const std::string& text) {
  const auto forced = ForcedCalls(model, conversation);
  EXPECT_TRUE(forced.ok() && forced->has_value()) << Message(forced.status());
  auto grammar = CompileGrammar(model, **forced);
  EXPECT_TRUE(grammar.ok()) << Message(grammar.status()) << (*forced)->source;
  const auto ids = model.tokenizer.Encode(text, false).value();
  for (const int32_t id : ids) {
    if (grammar->CountValid(std::vector<int32_t>{id}).value() != 1) return false;
    EXPECT_TRUE(grammar->Commit(id).ok());
  }
  return grammar->IsAccepting().value();
}

constexpr const char* kGet = R"({"name": "get", "arguments": {"city": "Rome"}})";

TEST(ForcedCalls, FollowHermes) {
  const ServedModel model = Model(text::ToolFormat::kHermes);
  const std::string call = fmt::format("<tool_call>{}</tool_call>", kGet);
  const std::string spaced = fmt::format("<tool_call>\n{}\n</tool_call>", kGet);
  const std::string stop = R"(<tool_call>{"name": "stop", "arguments": {}}</tool_call>)";
  const Conversation required = Asks(ToolUse::kRequired);
  EXPECT_TRUE(Takes(model, required, call));
  EXPECT_TRUE(Takes(model, required, spaced + "\n" + stop));
  EXPECT_FALSE(Takes(model, required, "I would rather talk"));
  EXPECT_FALSE(Takes(model, required, R"(<tool_call>{"name": "get", "arguments": {"city": 7}}</tool_call>)"));
  EXPECT_FALSE(Takes(model, required, R"(<tool_call>{"name": "put", "arguments": {}}</tool_call>)"));
  const Conversation named = Asks(ToolUse::kNamed, "stop");
  EXPECT_TRUE(Takes(model, named, stop));
  EXPECT_FALSE(Takes(model, named, stop + stop));
  EXPECT_FALSE(Takes(model, named, call));
  Conversation single = Asks(ToolUse::kRequired);
  single.parallel_calls = false;
  EXPECT_FALSE(Takes(model, single, call + call));
}

TEST(ForcedCalls, FollowTheOtherFormats) {
  EXPECT_TRUE(Takes(Model(text::ToolFormat::kDeepSeekV3), Asks(ToolUse::kRequired),
                    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n{"
                    "\"city\": \"Rome\"}\n```"
                    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"));
  EXPECT_TRUE(Takes(
      Model(text::ToolFormat::kDeepSeekV31), Asks(ToolUse::kRequired),
      "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{\"city\": \"Rome\"}<｜tool▁call▁end｜>"
      "<｜tool▁calls▁end｜>"));
  EXPECT_TRUE(
      Takes(Model(text::ToolFormat::kKimiK2), Asks(ToolUse::kRequired),
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>"
            "{\"city\": \"Rome\"}<|tool_call_end|><|tool_calls_section_end|>"));
  EXPECT_TRUE(Takes(Model(text::ToolFormat::kLlama3), Asks(ToolUse::kRequired),
                    R"({"name": "get", "parameters": {"city": "Rome"}})"));
  const auto refused = ForcedCalls(Model(text::ToolFormat::kGlm4), Asks(ToolUse::kRequired));
  EXPECT_EQ(refused.status().code(), StatusCode::kUnimplemented);
}

TEST(ForcedCalls, AreNoneUnlessAskedFor) {
  EXPECT_FALSE(ForcedCalls(Model(text::ToolFormat::kHermes), Asks(ToolUse::kAuto)).value().has_value());
}

// moesaic-tiny's 1,536 tokens fill 48 words to the last bit.
TEST(Structured, MasksHaveABitForEachToken) {
  const ServedModel model = Model(text::ToolFormat::kHermes);
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
