// Tests which outputs the grammars of forced calls accept.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "server/structured.h"
#include "server/test_model.h"
#include "server/tool_grammar.h"

namespace moesaic::server {
namespace {

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

// Returns true if the grammar accepts `text` as a complete output.
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

constexpr const char* kGetCall = R"({"name": "get", "arguments": {"city": "Rome"}})";

TEST(ForcedCalls, FollowTheFormatOfHermes) {
  const ServedModel model = TinyModel(text::ToolFormat::kHermes);
  const std::string call = fmt::format("<tool_call>{}</tool_call>", kGetCall);
  const std::string spaced = fmt::format("<tool_call>\n{}\n</tool_call>", kGetCall);
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
  EXPECT_TRUE(Takes(TinyModel(text::ToolFormat::kDeepSeekV3), Asks(ToolUse::kRequired),
                    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n{"
                    "\"city\": \"Rome\"}\n```"
                    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"));
  EXPECT_TRUE(Takes(
      TinyModel(text::ToolFormat::kDeepSeekV31), Asks(ToolUse::kRequired),
      "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get<｜tool▁sep｜>{\"city\": \"Rome\"}<｜tool▁call▁end｜>"
      "<｜tool▁calls▁end｜>"));
  EXPECT_TRUE(
      Takes(TinyModel(text::ToolFormat::kKimiK2), Asks(ToolUse::kRequired),
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>"
            "{\"city\": \"Rome\"}<|tool_call_end|><|tool_calls_section_end|>"));
  EXPECT_TRUE(Takes(TinyModel(text::ToolFormat::kLlama3), Asks(ToolUse::kRequired),
                    R"({"name": "get", "parameters": {"city": "Rome"}})"));
  const auto refused = ForcedCalls(TinyModel(text::ToolFormat::kNone), Asks(ToolUse::kRequired));
  EXPECT_EQ(refused.status().code(), StatusCode::kUnimplemented);
}

// Spells calls of one tool with every kind of parameter in the formats whose arguments are framed by marks.
struct XmlWords {
  text::ToolFormat format;
  std::string open, close;
  std::string (*argument)(const std::string& key, const std::string& value, bool is_string);
};

const std::vector<XmlWords>& XmlFormats() {
  static const std::vector<XmlWords> formats = {
      {text::ToolFormat::kQwen3Coder, "<tool_call>\n<function=book>\n", "</function>\n</tool_call>",
       [](const std::string& key, const std::string& value, bool) {
         return fmt::format("<parameter={}>\n{}\n</parameter>\n", key, value);
       }},
      {text::ToolFormat::kGlm4, "\n<tool_call>book\n", "</tool_call>",
       [](const std::string& key, const std::string& value, bool) {
         return fmt::format("<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", key, value);
       }},
      {text::ToolFormat::kMiniMaxM2, "\n<minimax:tool_call>\n<invoke name=\"book\">\n",
       "</invoke>\n</minimax:tool_call>",
       [](const std::string& key, const std::string& value, bool) {
         return fmt::format("<parameter name=\"{}\">{}</parameter>\n", key, value);
       }},
      {text::ToolFormat::kDeepSeekV32, "\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"book\">\n",
       "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
       [](const std::string& key, const std::string& value, bool is_string) {
         return fmt::format("<｜DSML｜parameter name=\"{}\" string=\"{}\">{}</｜DSML｜parameter>\n", key,
                            is_string, value);
       }}};
  return formats;
}

Conversation Books() {
  Conversation conversation = Asks(ToolUse::kRequired);
  conversation.tools = *ParseJson(R"([
    {"type": "function", "function": {"name": "book", "parameters": {
      "type": "object", "required": ["city", "nights", "meal"],
      "$defs": {"guest": {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"],
                          "additionalProperties": false}},
      "properties": {
        "city": {"type": "string", "maxLength": 24},
        "nights": {"type": "integer", "minimum": 1, "maximum": 9},
        "meal": {"type": "string", "enum": ["none", "breakfast"]},
        "guests": {"type": "array", "items": {"$ref": "#/$defs/guest"}}}}}}])");
  return conversation;
}

TEST(ForcedCalls, FollowTheFormatsWithMarks) {
  for (const XmlWords& words : XmlFormats()) {
    SCOPED_TRACE(text::Name(words.format));
    const ServedModel model = TinyModel(words.format);
    const Conversation books = Books();
    const auto call = [&words](const std::string& city, const std::string& nights, const std::string& meal,
                               const std::string& guests = "") {
      return words.open + words.argument("city", city, true) + words.argument("nights", nights, false) +
             words.argument("meal", meal, true) +
             (guests.empty() ? "" : words.argument("guests", guests, false)) + words.close;
    };
    EXPECT_TRUE(Takes(model, books, call("Rome", "3", "breakfast")));
    EXPECT_TRUE(Takes(model, books, call("a < b, </x> & \"q\"\nnext", "9", "none", R"([{"age": 7}])")));
    EXPECT_FALSE(Takes(model, books, call("Rome", "10", "none"))) << "too many nights";
    EXPECT_FALSE(Takes(model, books, call("Rome", "\"3\"", "none"))) << "a string for a number";
    EXPECT_FALSE(Takes(model, books, call("Rome", "3", "lunch"))) << "not in the enum";
    EXPECT_FALSE(Takes(model, books, call(std::string(40, 'x'), "3", "none"))) << "too long";
    EXPECT_FALSE(Takes(model, books, call("Rome", "3", "none", R"([{"age": "old"}])"))) << "not the $ref";
    EXPECT_FALSE(Takes(model, books, words.open + words.argument("city", "Rome", true) + words.close))
        << "arguments are missing";
    EXPECT_FALSE(Takes(model, books, "Which city?"));
    Conversation none = Asks(ToolUse::kNamed, "book");
    none.tools = *ParseJson(R"([{"type": "function", "function": {"name": "book"}}])");
    EXPECT_TRUE(Takes(model, none, words.open + words.close)) << "no parameters";
  }
}

// References inside a parameter's schema point into the whole schema of the arguments.
TEST(ForcedCalls, FollowReferencesToOtherParameters) {
  Conversation trees = Asks(ToolUse::kRequired);
  trees.tools = *ParseJson(R"([{"type": "function", "function": {"name": "book", "parameters": {
      "type": "object", "required": ["tree", "twin"],
      "properties": {
        "tree": {"type": "object", "properties": {"left": {"$ref": "#/properties/tree"}}, "required": [],
                 "additionalProperties": false},
        "twin": {"$ref": "#/properties/tree"}}}}}])");
  for (const XmlWords& words : XmlFormats()) {
    SCOPED_TRACE(text::Name(words.format));
    const ServedModel model = TinyModel(words.format);
    const auto call = [&words](const char* tree, const char* twin) {
      return words.open + words.argument("tree", tree, false) + words.argument("twin", twin, false) +
             words.close;
    };
    EXPECT_TRUE(Takes(model, trees, call(R"({"left": {"left": {}}})", R"({"left": {}})")));
    EXPECT_FALSE(Takes(model, trees, call(R"({"left": {"right": {}}})", "{}")));
    EXPECT_FALSE(Takes(model, trees, call("{}", R"({"left": 3})")));
  }
}

TEST(ForcedCalls, RefuseReferencesThatNeverEnd) {
  Conversation loops = Asks(ToolUse::kRequired);
  loops.tools =
      *ParseJson(R"([{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}])");
  const ServedModel model = TinyModel(text::ToolFormat::kHermes);
  const Status refused = CompileGrammar(model, *ForcedCalls(model, loops).value()).status();
  EXPECT_EQ(refused.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(Message(refused).find("Invalid 'tools': the JSON schema matches no finite text"),
            std::string::npos)
      << Message(refused);
}

// A parameter with a reference has a copy of the whole schema. No text of all copies, here 10 MB, is made.
TEST(ForcedCalls, StopAtTheLimitOfSchemas) {
  Conversation large = Asks(ToolUse::kRequired);
  large.tools = *ParseJson(R"([{"type": "function", "function": {"name": "f"}}])");
  Json& schema = large.tools[0]["function"]["parameters"];
  schema = *ParseJson(R"({"type": "object"})");
  schema["description"] = std::string(100'000, ' ');
  for (int i = 0; i < 100; ++i) schema["properties"][fmt::format("a{}", i)]["$ref"] = "#";
  for (const XmlWords& words : XmlFormats()) {
    const auto refused = ForcedCalls(TinyModel(words.format), large);
    EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(Message(refused.status()).find("more than 262144 bytes"), std::string::npos)
        << Message(refused.status());
  }
}

// The parser reads the arguments back from a text that the grammar accepts.
TEST(ForcedCalls, AreUnderstoodByTheParsers) {
  for (const XmlWords& words : XmlFormats()) {
    SCOPED_TRACE(text::Name(words.format));
    const std::string text = words.open + words.argument("city", "Santa </x> Fe", true) +
                             words.argument("nights", "3", false) + words.argument("meal", "none", true) +
                             words.argument("guests", R"([{"age": 7}])", false) + words.close;
    const Conversation books = Books();
    ASSERT_TRUE(Takes(TinyModel(words.format), books, text));
    const auto parser = text::MakeToolCallParser(words.format, Dump(books.tools));
    text::ToolDelta delta;
    parser->Push(text, &delta);
    parser->Finish(&delta);
    std::string arguments;
    for (const text::ToolCallDelta& piece : delta.calls) arguments += piece.arguments;
    EXPECT_EQ(
        *ParseJson(arguments),
        *ParseJson(R"({"city": "Santa </x> Fe", "nights": 3, "meal": "none", "guests": [{"age": 7}]})"));
    EXPECT_EQ(parser->calls(), 1);
  }
}

TEST(ForcedCalls, RefuseNamesThatTheMarksCannotHold) {
  Conversation odd = Asks(ToolUse::kRequired);
  odd.tools = *ParseJson(R"([{"type": "function", "function": {"name": "f", "parameters":
    {"type": "object", "properties": {"a>b": {"type": "string"}}}}}])");
  const auto refused = ForcedCalls(TinyModel(text::ToolFormat::kGlm4), odd);
  EXPECT_EQ(refused.status().code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(ForcedCalls(TinyModel(text::ToolFormat::kHermes), odd).ok());
}

TEST(ForcedCalls, NeedAToolChoiceThatRequiresThem) {
  EXPECT_FALSE(ForcedCalls(TinyModel(text::ToolFormat::kHermes), Asks(ToolUse::kAuto)).value().has_value());
}

}  // namespace
}  // namespace moesaic::server
