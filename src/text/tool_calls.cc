#include "text/tool_calls.h"

#include <array>
#include <utility>

#include "text/tool_calls_json.h"
#include "text/tool_calls_xml.h"

namespace moesaic::text {
namespace {

constexpr std::array<std::pair<ToolFormat, const char*>, 10> kNames = {
    {{ToolFormat::kNone, "none"},
     {ToolFormat::kHermes, "hermes"},
     {ToolFormat::kQwen3Coder, "qwen3-coder"},
     {ToolFormat::kDeepSeekV3, "deepseek-v3"},
     {ToolFormat::kDeepSeekV31, "deepseek-v3.1"},
     {ToolFormat::kDeepSeekV32, "deepseek-v3.2"},
     {ToolFormat::kKimiK2, "kimi-k2"},
     {ToolFormat::kGlm4, "glm-4"},
     {ToolFormat::kLlama3, "llama3"},
     {ToolFormat::kMiniMaxM2, "minimax-m2"}}};

constexpr JsonCallFormat kHermes{.section_open = "",
                                 .call_open = "<tool_call>",
                                 .arguments_open = "",
                                 .call_close = "</tool_call>",
                                 .section_close = ""};
constexpr JsonCallFormat kLlama3Calls{.section_open = "",
                                      .call_open = "<|python_tag|>",
                                      .arguments_open = "",
                                      .call_close = "",
                                      .section_close = "",
                                      .starts_bare = true};
constexpr JsonCallFormat kDeepSeekV3{.section_open = "<｜tool▁calls▁begin｜>",
                                     .call_open = "<｜tool▁call▁begin｜>",
                                     .arguments_open = "```json",
                                     .call_close = "<｜tool▁call▁end｜>",
                                     .section_close = "<｜tool▁calls▁end｜>",
                                     .arguments_close = "```"};
constexpr JsonCallFormat kDeepSeekV31{.section_open = kDeepSeekV3.section_open,
                                      .call_open = kDeepSeekV3.call_open,
                                      .arguments_open = "<｜tool▁sep｜>",
                                      .call_close = kDeepSeekV3.call_close,
                                      .section_close = kDeepSeekV3.section_close};
constexpr JsonCallFormat kKimiK2{.section_open = "<|tool_calls_section_begin|>",
                                 .call_open = "<|tool_call_begin|>",
                                 .arguments_open = "<|tool_call_argument_begin|>",
                                 .call_close = "<|tool_call_end|>",
                                 .section_close = "<|tool_calls_section_end|>"};

constexpr XmlCallFormat kQwen3Coder{.section_open = "<tool_call>",
                                    .call_open = "<function=",
                                    .call_open_end = ">",
                                    .param_open = "<parameter=",
                                    .param_open_end = ">",
                                    .value_open = "",
                                    .param_close = "</parameter>",
                                    .call_close = "</function>",
                                    .section_close = "</tool_call>"};
constexpr XmlCallFormat kGlm4{.section_open = "",
                              .call_open = "<tool_call>",
                              .call_open_end = "\n",
                              .param_open = "<arg_key>",
                              .param_open_end = "</arg_key>",
                              .value_open = "<arg_value>",
                              .param_close = "</arg_value>",
                              .call_close = "</tool_call>",
                              .section_close = ""};
constexpr XmlCallFormat kMiniMaxM2{.section_open = "<minimax:tool_call>",
                                   .call_open = "<invoke name=\"",
                                   .call_open_end = "\">",
                                   .param_open = "<parameter name=\"",
                                   .param_open_end = "\">",
                                   .value_open = "",
                                   .param_close = "</parameter>",
                                   .call_close = "</invoke>",
                                   .section_close = "</minimax:tool_call>"};
constexpr XmlCallFormat kDeepSeekV32{.section_open = "<｜DSML｜function_calls>",
                                     .call_open = "<｜DSML｜invoke name=\"",
                                     .call_open_end = "\">",
                                     .param_open = "<｜DSML｜parameter name=\"",
                                     .param_open_end = "\">",
                                     .value_open = "",
                                     .param_close = "</｜DSML｜parameter>",
                                     .call_close = "</｜DSML｜invoke>",
                                     .section_close = "</｜DSML｜function_calls>",
                                     .typed_keys = true};

const JsonCallFormat* JsonFormat(ToolFormat format) {
  switch (format) {
    case ToolFormat::kHermes:
      return &kHermes;
    case ToolFormat::kLlama3:
      return &kLlama3Calls;
    case ToolFormat::kDeepSeekV3:
      return &kDeepSeekV3;
    case ToolFormat::kDeepSeekV31:
      return &kDeepSeekV31;
    case ToolFormat::kKimiK2:
      return &kKimiK2;
    default:
      return nullptr;
  }
}

const XmlCallFormat* XmlFormat(ToolFormat format) {
  switch (format) {
    case ToolFormat::kQwen3Coder:
      return &kQwen3Coder;
    case ToolFormat::kGlm4:
      return &kGlm4;
    case ToolFormat::kMiniMaxM2:
      return &kMiniMaxM2;
    case ToolFormat::kDeepSeekV32:
      return &kDeepSeekV32;
    default:
      return nullptr;
  }
}

class NoCalls : public ToolCallParser {
 public:
  void Push(std::string_view piece, ToolDelta* delta) override { delta->content.append(piece); }
  void Finish(ToolDelta*) override {}
};

}  // namespace

StatusOr<ToolFormat> ParseToolFormat(std::string_view name) {
  for (const auto& [format, known] : kNames) {
    if (name == known) return format;
  }
  return InvalidArgument("tool format must be one of {}, found \"{}\"", ToolFormatNames(), name);
}

const char* Name(ToolFormat format) {
  for (const auto& [known, name] : kNames) {
    if (format == known) return name;
  }
  return "none";
}

std::string ToolFormatNames() {
  std::string names;
  for (const auto& [format, name] : kNames) names += (names.empty() ? "" : ", ") + std::string(name);
  return names;
}

ToolFormat DetectToolFormat(std::string_view source) {
  const auto has = [source](std::string_view mark) { return source.find(mark) != std::string_view::npos; };
  if (has("<|tool_call_argument_begin|>")) return ToolFormat::kKimiK2;
  if (has("｜DSML｜")) return ToolFormat::kDeepSeekV32;
  if (has("<｜tool▁calls▁begin｜>"))
    return has("```json") ? ToolFormat::kDeepSeekV3 : ToolFormat::kDeepSeekV31;
  if (has("<minimax:tool_call>")) return ToolFormat::kMiniMaxM2;
  if (has("<arg_key>")) return ToolFormat::kGlm4;
  if (has("<function=")) return ToolFormat::kQwen3Coder;
  if (has("<tool_call>")) return ToolFormat::kHermes;
  if (has("<|python_tag|>") || has("\"parameters\": ")) return ToolFormat::kLlama3;
  return has("tools") ? ToolFormat::kHermes : ToolFormat::kNone;
}

std::vector<std::string_view> ToolMarks(ToolFormat format) {
  if (const JsonCallFormat* json = JsonFormat(format)) {
    return {json->section_open, json->call_open,     json->arguments_open,
            json->call_close,   json->section_close, "<｜tool▁sep｜>"};
  }
  if (const XmlCallFormat* xml = XmlFormat(format)) {
    return {xml->section_open, xml->call_open,  xml->param_open,    xml->param_open_end, xml->value_open,
            xml->param_close,  xml->call_close, xml->section_close, "｜DSML｜"};
  }
  return {};
}

std::string_view CallOpen(ToolFormat format) {
  if (const JsonCallFormat* json = JsonFormat(format)) {
    return json->section_open.empty() ? json->call_open : json->section_open;
  }
  if (const XmlCallFormat* xml = XmlFormat(format)) {
    return xml->section_open.empty() ? xml->call_open : xml->section_open;
  }
  return {};
}

std::unique_ptr<ToolCallParser> MakeToolCallParser(ToolFormat format, std::string_view tools_json) {
  if (const JsonCallFormat* json = JsonFormat(format)) return std::make_unique<JsonCallParser>(*json);
  if (const XmlCallFormat* xml = XmlFormat(format)) return std::make_unique<XmlCallParser>(*xml, tools_json);
  return std::make_unique<NoCalls>();
}

}  // namespace moesaic::text
