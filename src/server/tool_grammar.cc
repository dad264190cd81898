#include "server/tool_grammar.h"

#include <optional>

#include "server/lark_terms.h"
#include "server/tool_grammar_xml.h"

namespace moesaic::server {
namespace {

// Texts around the name and the arguments of a call, and around all calls.
struct Frame {
  const char *section_open, *call_open, *before_name, *between, *after_arguments, *call_close, *section_close;
  bool numbered = false;  // true if the call's number follows the name
};

std::optional<Frame> FrameOf(text::ToolFormat format) {
  switch (format) {
    case text::ToolFormat::kHermes:
      return Frame{"", "<tool_call>", "\n?{\"name\": \"", "\", \"arguments\": ", "}\n?", "</tool_call>", ""};
    case text::ToolFormat::kLlama3:
      return Frame{"", "", "{\"name\": \"", "\", \"parameters\": ", "}", "", ""};
    case text::ToolFormat::kDeepSeekV3:
      return Frame{
          "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "function<｜tool▁sep｜>", "\n```json\n", "\n```",
          "<｜tool▁call▁end｜>",    "<｜tool▁calls▁end｜>"};
    case text::ToolFormat::kDeepSeekV31:
      return Frame{"<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "", "<｜tool▁sep｜>", "",
                   "<｜tool▁call▁end｜>",    "<｜tool▁calls▁end｜>"};
    case text::ToolFormat::kKimiK2:
      return Frame{"<|tool_calls_section_begin|>",
                   "<|tool_call_begin|>",
                   "functions.",
                   "<|tool_call_argument_begin|>",
                   "",
                   "<|tool_call_end|>",
                   "<|tool_calls_section_end|>",
                   true};
    default:
      return std::nullopt;
  }
}

}  // namespace

StatusOr<std::string> ToolGrammar(text::ToolFormat format, const text::Tokenizer& tokenizer,
                                  const Conversation& conversation, size_t most_bytes) {
  const std::optional<Frame> frame = FrameOf(format);
  if (!frame) return XmlToolGrammar(format, tokenizer, conversation, most_bytes);
  const LarkTerms terms(tokenizer, format);
  std::string calls, rules;
  int count = 0;
  for (const Json& tool : conversation.tools) {
    const Json& function = tool["function"];
    const auto& name = function["name"].get_ref<const std::string&>();
    if (!MayCall(conversation, name)) continue;
    calls += fmt::format("{}call_{}", count == 0 ? "" : " | ", count);
    rules += fmt::format("call_{}:{}{}{}{} arguments_{}{}{}\n", count, terms.Of(frame->call_open),
                         terms.Of(frame->before_name + name), frame->numbered ? " \":\" /[0-9]{1,4}/" : "",
                         terms.Of(frame->between), count, terms.Of(frame->after_arguments),
                         terms.Of(frame->call_close));
    rules += fmt::format("arguments_{}: %json {}\n", count, Dump(ParametersOf(function)));
    ++count;
  }
  const bool several = MayCallSeveral(conversation) && format != text::ToolFormat::kLlama3;
  std::string grammar = "start:" + terms.Of(frame->section_open) + " call";
  if (several) grammar += " (\"\\n\"? call)*";
  return grammar + terms.Of(frame->section_close) + "\ncall: " + calls + "\n" + rules;
}

}  // namespace moesaic::server
