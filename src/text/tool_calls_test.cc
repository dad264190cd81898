#include "text/tool_calls.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>

#include "text/markers.h"
#include "text/reasoning.h"
#include "text/test_data.h"

namespace moesaic::text {
namespace {

using Json = nlohmann::ordered_json;

struct Parsed {
  std::string content;
  Json calls = Json::array();  // name, arguments as text
};

void Take(const ToolDelta& delta, Parsed* parsed) {
  parsed->content += delta.content;
  for (const ToolCallDelta& call : delta.calls) {
    if (!call.name.empty()) {
      EXPECT_EQ(static_cast<size_t>(call.index), parsed->calls.size());
      parsed->calls.push_back({{"name", call.name}, {"arguments", ""}, {"id", call.id}});
    }
    ASSERT_LT(static_cast<size_t>(call.index), parsed->calls.size());
    Json& arguments = parsed->calls[call.index]["arguments"];
    arguments = arguments.get<std::string>() + call.arguments;
  }
}

// Parses `text` in pieces of `size` bytes.
Parsed Parse(ToolFormat format, const std::string& text, size_t size, const std::string& tools = "") {
  const auto parser = MakeToolCallParser(format, tools);
  Parsed parsed;
  for (size_t at = 0; at < text.size(); at += size) {
    ToolDelta delta;
    parser->Push(std::string_view(text).substr(at, size), &delta);
    Take(delta, &parsed);
  }
  ToolDelta delta;
  parser->Finish(&delta);
  Take(delta, &parsed);
  return parsed;
}

ToolFormat FormatOf(const std::string& name) {
  static const std::map<std::string, ToolFormat> formats = {{"qwen3", ToolFormat::kHermes},
                                                            {"qwen2.5(hermes)", ToolFormat::kHermes},
                                                            {"qwen3-coder", ToolFormat::kQwen3Coder},
                                                            {"deepseek-r1/v3", ToolFormat::kDeepSeekV3},
                                                            {"deepseek-v3.1", ToolFormat::kDeepSeekV31},
                                                            {"deepseek-v3.2", ToolFormat::kDeepSeekV32},
                                                            {"kimi-k2", ToolFormat::kKimiK2},
                                                            {"kimi-k2-thinking", ToolFormat::kKimiK2},
                                                            {"glm-4.6", ToolFormat::kGlm4},
                                                            {"llama3.1", ToolFormat::kLlama3},
                                                            {"minimax-m2", ToolFormat::kMiniMaxM2}};
  return formats.at(name);
}

// Returns the completion without end tokens and reasoning, which other components remove.
std::string Answer(std::string text) {
  for (const char* end : {"<|im_end|>", "<｜end▁of▁sentence｜>", "<|eot_id|>", "[e~["}) {
    text.erase(std::min(text.find(end), text.size()));
  }
  ReasoningSplitter splitter(ReasoningFormat::kThink, false);
  std::string reasoning, content;
  splitter.Push(text, &reasoning, &content);
  splitter.Finish(&reasoning, &content);
  return content;
}

void CheckRow(const Json& row, size_t size) {
  const std::string text = Answer(row["completion"]);
  const Parsed parsed = Parse(FormatOf(row["format"]), text, size, row["tools"].dump());
  SCOPED_TRACE(row["format"].get<std::string>() + " " + row["id"].get<std::string>() + " " + text);
  // Llama's template omits the lead text.
  const std::string lead = row["format"] == "llama3.1" ? "" : row["lead"].get<std::string>();
  EXPECT_EQ(Trimmed(parsed.content), lead);
  ASSERT_EQ(parsed.calls.size(), row["calls"].size());
  for (size_t i = 0; i < parsed.calls.size(); ++i) {
    EXPECT_EQ(parsed.calls[i]["name"], row["calls"][i]["name"]);
    EXPECT_EQ(nlohmann::json::parse(parsed.calls[i]["arguments"].get<std::string>(), nullptr, false),
              nlohmann::json(row["calls"][i]["arguments"]))
        << parsed.calls[i]["arguments"];
  }
}

class RoundTrip : public testing::TestWithParam<const char*> {};

TEST_P(RoundTrip, ParsesCallsForEveryCutOfTheText) {
  const auto path = SharedData() / "toolparse" / GetParam();
  SKIP_WITHOUT(path);
  const auto rows = ReadRows(path);
  ASSERT_FALSE(rows.empty());
  for (const Json& row : rows) {
    for (const size_t size : {size_t{1}, size_t{2}, size_t{7}, size_t{1} << 20}) CheckRow(row, size);
    if (HasFailure()) return;
  }
}

// The parser must accept every prefix, and the calls begun must be those of the whole text.
TEST_P(RoundTrip, AcceptsEveryPrefix) {
  const auto path = SharedData() / "toolparse" / GetParam();
  SKIP_WITHOUT(path);
  const auto rows = ReadRows(path);
  for (size_t i = 0; i < rows.size(); i += 5) {
    const std::string text = Answer(rows[i]["completion"]);
    const ToolFormat format = FormatOf(rows[i]["format"]);
    for (size_t length = 0; length < text.size(); ++length) {
      const Parsed parsed = Parse(format, text.substr(0, length), 3, rows[i]["tools"].dump());
      ASSERT_LE(parsed.calls.size(), rows[i]["calls"].size());
      for (size_t c = 0; c < parsed.calls.size(); ++c) {
        ASSERT_EQ(parsed.calls[c]["name"], rows[i]["calls"][c]["name"]);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Bfcl, RoundTrip,
                         testing::Values("bfcl_roundtrip_dev.jsonl.gz",
                                         "bfcl_roundtrip_deepseek_v32_dev.jsonl.gz"),
                         [](const auto& info) { return info.index == 0 ? "Templates" : "DeepSeekV32"; });

TEST(ToolCalls, KeepsTextThatIsNotACall) {
  for (const std::string text : {"plain", "a < b, <tool", "<tool_call>no object</tool_call>",
                                 "<tool_call>{\"nome\": 1}</tool_call> end", "<tool_call>",
                                 "x <tool_call>{\"arguments\": {\"a\"", "trailing space  "}) {
    for (const size_t size : {size_t{1}, size_t{100}}) {
      const Parsed parsed = Parse(ToolFormat::kHermes, text, size);
      EXPECT_EQ(parsed.calls.size(), 0u) << text;
      const std::string mark = text.substr(0, text.find('<'));
      EXPECT_TRUE(parsed.content.starts_with(mark.substr(0, mark.find_last_not_of(' ') + 1)))
          << parsed.content;
    }
  }
}

TEST(ToolCalls, AcceptsCommonModelMistakes) {
  // Arguments before the name, a missing brace, marks inside strings, arguments as a string.
  struct Case {
    const char *text, *name, *arguments;
  };
  for (const Case& c :
       {Case{R"(<tool_call>{"arguments": {"x": [1, {"y": 2}]}, "name": "f"}</tool_call>)", "f",
             R"({"x": [1, {"y": 2}]})"},
        Case{R"(<tool_call>{"name": "f", "arguments": {"x": 1}</tool_call>)", "f", R"({"x": 1})"},
        Case{R"(<tool_call>{"name": "f", "arguments": {"x": "</tool_call> \" }"}}</tool_call>)", "f",
             R"({"x": "</tool_call> \" }"})"},
        Case{R"(<tool_call> {"name": "f", "arguments": "{\"x\": 1}"} </tool_call>)", "f", R"({"x": 1})"},
        Case{R"(<tool_call>{"name": "f"}</tool_call>)", "f", "{}"},
        Case{R"(<tool_call>{"name": "f", "arguments": {"x": 1} )", "f", R"({"x": 1})"}}) {
    for (const size_t size : {size_t{1}, size_t{4}, size_t{1000}}) {
      const Parsed parsed = Parse(ToolFormat::kHermes, c.text, size);
      ASSERT_EQ(parsed.calls.size(), 1u) << c.text;
      EXPECT_EQ(parsed.calls[0]["name"], c.name);
      EXPECT_EQ(parsed.calls[0]["arguments"], c.arguments) << c.text;
      EXPECT_EQ(parsed.content, "");
    }
  }
}

TEST(ToolCalls, KeepsTextInSectionThatIsNotACall) {
  const std::string begin = "<｜tool▁calls▁begin｜>", end = "<｜tool▁calls▁end｜>";
  const std::string call =
      "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"x\": 1}\n```<｜tool▁call▁end｜>";
  struct Case {
    std::string text, content;
    size_t calls;
  };
  for (const Case& c : {
           Case{begin + "I can't call." + end, "I can't call.", 0},
           Case{begin + "First this: " + call + "\n" + call + " and done" + end + " bye",
                "First this: and done bye", 2},
           Case{begin + "cut off", "cut off", 0},
           Case{begin + call + " and", "and", 1},
           Case{begin + "<｜tool▁call▁begin｜>no name<｜tool▁call▁end｜>" + end,
                "<｜tool▁call▁begin｜>no name<｜tool▁call▁end｜>", 0},
           Case{begin +
                    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"x\": 1}\n``` "
                    "so<｜tool▁call▁end｜>" +
                    end,
                "so", 1},
       }) {
    for (const size_t size : {size_t{1}, size_t{4}, size_t{1000}}) {
      const Parsed parsed = Parse(ToolFormat::kDeepSeekV3, c.text, size);
      EXPECT_EQ(parsed.calls.size(), c.calls) << c.text;
      for (const Json& one : parsed.calls) EXPECT_EQ(one["arguments"], R"({"x": 1})");
      // White space around calls may be dropped.
      std::string content, expected;
      for (const char letter : parsed.content) content += letter == ' ' ? "" : std::string(1, letter);
      for (const char letter : c.content) expected += letter == ' ' ? "" : std::string(1, letter);
      EXPECT_EQ(content, expected) << c.text << " by " << size;
    }
  }
}

TEST(ToolCalls, KeepsTextInMarkedSectionThatIsNotACall) {
  const std::string call = "<function=f>\n<parameter=x>\n1\n</parameter>\n</function>";
  struct Case {
    std::string text, content;
    size_t calls;
  };
  for (const Case& c : {
           Case{"<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>",
                "{\"name\": \"f\", \"arguments\": {}}", 0},
           Case{"<tool_call>I can't call.</tool_call> bye", "I can't call. bye", 0},
           Case{"<tool_call>First this: " + call + "\n</tool_call>", "First this:", 1},
           Case{"<tool_call>" + call + " and <done</tool_call>", " and <done", 1},
           Case{"<tool_call>cut off", "cut off", 0},
           Case{"<tool_call>" + call + "\n", "", 1},
           Case{"<tool_call>" + call + "<tool_call>" + call + "</tool_call>", "", 2},
           Case{"<tool_call>" + call + "</function>\n</tool_call>", "", 1},
           Case{"<tool_call>" + call + "\n</tool", "", 1},
       }) {
    for (const size_t size : {size_t{1}, size_t{4}, size_t{1000}}) {
      const Parsed parsed = Parse(ToolFormat::kQwen3Coder, c.text, size);
      EXPECT_EQ(parsed.calls.size(), c.calls) << c.text;
      for (const Json& one : parsed.calls) EXPECT_EQ(one["arguments"], R"({"x": 1})");
      EXPECT_EQ(Trimmed(parsed.content), Trimmed(c.content)) << c.text << " by " << size;
    }
  }
}

TEST(ToolCalls, EndsUnclosedArgumentsAtTheFence) {
  struct Case {
    const char *written, *arguments;
  };
  for (const Case& c : {Case{"{\"x\": [1, {\"y\": 2}\n```", "{\"x\": [1, {\"y\": 2}"},
                        Case{"{\"x\": 1,\n```", "{\"x\": 1,"}, Case{"{\"x\": \"open\n```", "{\"x\": \"open"},
                        Case{"{\"x\": \"a\n```b\n\"}\n```", "{\"x\": \"a\n```b\n\"}"},
                        Case{"{\"x\": \"``\" }\n```\n", "{\"x\": \"``\" }"}, Case{"null\n```", "{}"}}) {
    const std::string text =
        std::string("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n") +
        c.written + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    for (const size_t size : {size_t{1}, size_t{4}, size_t{1000}}) {
      const Parsed parsed = Parse(ToolFormat::kDeepSeekV3, text, size);
      ASSERT_EQ(parsed.calls.size(), 1u) << text;
      EXPECT_EQ(parsed.calls[0]["arguments"], c.arguments) << "by " << size;
      EXPECT_EQ(parsed.content, "") << text;
    }
  }
}

// Truncated arguments must be the same for every way of cutting the text.
TEST(ToolCalls, KeepsTrailingSpaceOfTruncatedCall) {
  const std::string call = R"({"name": "f", "parameters": {"x": [1, { "y" : "a  b" } ], "z": )";
  const std::string start = R"({"name": "f", "parameters": )";
  for (const ToolFormat format : {ToolFormat::kLlama3, ToolFormat::kHermes, ToolFormat::kDeepSeekV3}) {
    for (size_t length = start.size() + 1; length <= call.size(); ++length) {
      std::string text = call.substr(0, length);
      if (format == ToolFormat::kHermes) text.insert(0, "<tool_call>");
      if (format == ToolFormat::kDeepSeekV3) {
        text.replace(0, start.size(),
                     "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n");
      }
      for (const size_t size : {size_t{1}, size_t{1000}}) {
        const Parsed parsed = Parse(format, text, size);
        ASSERT_EQ(parsed.calls.size(), 1u) << text;
        EXPECT_EQ(parsed.calls[0]["arguments"], call.substr(start.size(), length - start.size()))
            << "by " << size;
        EXPECT_EQ(parsed.content, "");
      }
    }
  }
}

TEST(ToolCalls, StreamsArguments) {
  const auto parser = MakeToolCallParser(ToolFormat::kHermes, "");
  ToolDelta delta;
  parser->Push(R"(<tool_call>{"name": "f", "arguments": {"text": "one )", &delta);
  ASSERT_GE(delta.calls.size(), 1u);
  EXPECT_EQ(delta.calls[0].name, "f");
  EXPECT_EQ(delta.calls[0].arguments, R"({"text": "one )");
}

TEST(ToolCalls, KimiCallsHaveIds) {
  const Parsed parsed = Parse(ToolFormat::kKimiK2,
                              "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:3"
                              "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
                              1);
  ASSERT_EQ(parsed.calls.size(), 1u);
  EXPECT_EQ(parsed.calls[0]["id"], "functions.get:3");
}

TEST(ToolCalls, DetectsTheFormatOfTemplates) {
  const auto folder = SharedData() / "templates" / "jinja";
  SKIP_WITHOUT(folder);
  const auto detect = [&](const char* file) { return DetectToolFormat(ReadMaybeGzip(folder / file)); };
  EXPECT_EQ(detect("hf-qwen3.jinja"), ToolFormat::kHermes);
  EXPECT_EQ(detect("llama.cpp/Qwen3-Coder.jinja"), ToolFormat::kQwen3Coder);
  EXPECT_EQ(detect("hf-deepseek_v3.jinja"), ToolFormat::kDeepSeekV3);
  EXPECT_EQ(detect("llama.cpp/deepseek-ai-DeepSeek-V3.1.jinja"), ToolFormat::kDeepSeekV31);
  EXPECT_EQ(detect("llama.cpp/Kimi-K2-Instruct.jinja"), ToolFormat::kKimiK2);
  EXPECT_EQ(detect("llama.cpp/Kimi-K2-Thinking.jinja"), ToolFormat::kKimiK2);
  EXPECT_EQ(detect("llama.cpp/GLM-4.6.jinja"), ToolFormat::kGlm4);
  EXPECT_EQ(detect("llama.cpp/MiniMax-M2.jinja"), ToolFormat::kMiniMaxM2);
  EXPECT_EQ(detect("llama.cpp/NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja"), ToolFormat::kHermes);
  EXPECT_EQ(detect("llama.cpp/meta-llama-Llama-3.1-8B-Instruct.jinja"), ToolFormat::kLlama3);
}

TEST(Reasoning, SplitsForEveryCutOfTheText) {
  struct Case {
    const char* text;
    bool inside;
    const char *reasoning, *content;
  };
  for (const Case& c :
       {Case{"<think>\nwhy\n\nnot\n</think>\n\nyes", false, "why\n\nnot", "yes"},
        Case{"why</think>yes ", true, "why", "yes "}, Case{"yes </think>", false, "", "yes </think>"},
        Case{"<think>\n\n</think>\n\nyes", false, "", "yes"}, Case{"<think>cut of", false, "cut of", ""},
        Case{"\n<think>a</think>", false, "a", ""}, Case{"<thin", false, "", "<thin"},
        Case{"<think>a</think>b</think>c", true, "a", "b</think>c"}, Case{"", true, "", ""}}) {
    const std::string text = c.text;
    for (const size_t size : {size_t{1}, size_t{3}, size_t{100}}) {
      ReasoningSplitter splitter(ReasoningFormat::kThink, c.inside);
      std::string reasoning, content;
      for (size_t at = 0; at < text.size(); at += size)
        splitter.Push(text.substr(at, size), &reasoning, &content);
      splitter.Finish(&reasoning, &content);
      EXPECT_EQ(reasoning, c.reasoning) << text << " by " << size;
      EXPECT_EQ(content, c.content) << text << " by " << size;
    }
  }
}

TEST(Reasoning, ReturnsCallInUnclosedReasoningToCaller) {
  struct Case {
    const char *text, *reasoning, *content, *open;
  };
  for (const Case& c : {Case{"<think>why <tool_call>{} ", "why", "", " <tool_call>{} "},
                        Case{"<think>why <tool_call>{}</tool_call> so</think> yes",
                             "why <tool_call>{}</tool_call> so", "yes", ""},
                        Case{"<think>why <tool_ca", "why <tool_ca", "", ""},
                        Case{"<think>why</think><tool_call>", "why", "<tool_call>", ""},
                        Case{"<think><tool_call>{}", "", "", "<tool_call>{}"}}) {
    const std::string text = c.text;
    for (const size_t size : {size_t{1}, size_t{3}, size_t{100}}) {
      ReasoningSplitter splitter(ReasoningFormat::kThink, false, CallOpen(ToolFormat::kHermes));
      std::string reasoning, content;
      for (size_t at = 0; at < text.size(); at += size)
        splitter.Push(text.substr(at, size), &reasoning, &content);
      EXPECT_EQ(splitter.Finish(&reasoning, &content), c.open) << text << " by " << size;
      EXPECT_EQ(reasoning, c.reasoning) << text << " by " << size;
      EXPECT_EQ(content, c.content) << text << " by " << size;
    }
  }
}

TEST(Reasoning, DetectsOpenReasoningInPrompt) {
  EXPECT_TRUE(EndsInReasoning(ReasoningFormat::kThink, "<|Assistant|><think>\n"));
  EXPECT_FALSE(EndsInReasoning(ReasoningFormat::kThink, "<think>\n\n</think>\n\n"));
  EXPECT_FALSE(EndsInReasoning(ReasoningFormat::kNone, "<think>"));
}

// The text of a parameter that may be a string is not read as a number or a boolean.
TEST(ToolCalls, TypesThatMayBeStringsKeepTheirText) {
  struct Case {
    const char *schema, *written, *arguments;
  };
  for (const Case& c :
       {Case{R"({"anyOf": [{"type": "string"}, {"type": "null"}]})", "90210", R"({"x": "90210"})"},
        Case{R"({"type": ["string", "null"]})", "true", R"({"x": "true"})"},
        Case{R"({"type": ["string", "null"]})", "None", R"({"x": null})"},
        Case{R"({"enum": ["1", "2"]})", "1", R"({"x": "1"})"},
        Case{R"({"$ref": "#/$defs/zip"})", "90210", R"({"x": "90210"})"},
        Case{R"({"anyOf": [{"type": "string"}, {"type": "integer"}]})", "7", R"({"x": 7})"},
        Case{R"({"type": "string"})", "None", R"({"x": "None"})"}, Case{"{}", "7", R"({"x": 7})"}}) {
    const std::string tools =
        R"([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", )"
        R"("$defs": {"zip": {"type": "string"}}, "properties": {"x": )" +
        std::string(c.schema) + "}}}}]";
    const std::string text = "<tool_call>\n<function=f>\n<parameter=x>\n" + std::string(c.written) +
                             "\n</parameter>\n</function>\n</tool_call>";
    const Parsed parsed = Parse(ToolFormat::kQwen3Coder, text, 3, tools);
    ASSERT_EQ(parsed.calls.size(), 1U) << c.schema;
    EXPECT_EQ(parsed.calls[0]["arguments"], c.arguments) << c.schema;
  }
}

TEST(ToolCalls, CallsCutOffInTheFirstArgumentAreNotComplete) {
  for (const char* text :
       {"<tool_call><function=f><parameter=x", "<tool_call><function=f><parameter=x>\nlong"}) {
    const Parsed parsed = Parse(ToolFormat::kQwen3Coder, text, 2);
    ASSERT_EQ(parsed.calls.size(), 1U);
    EXPECT_EQ(parsed.calls[0]["arguments"], "{");
  }
}

TEST(ToolCalls, BareObjectsWithoutParametersAreContent) {
  for (const std::string text : {R"({"name": "Bob", "age": 20})", R"({"age": 20, "name": "Bob"})"}) {
    for (const size_t size : {size_t{1}, size_t{100}}) {
      const Parsed parsed = Parse(ToolFormat::kLlama3, text, size);
      EXPECT_EQ(parsed.calls.size(), 0U);
      EXPECT_EQ(parsed.content, text);
    }
  }
}

}  // namespace
}  // namespace moesaic::text
