#include "server/tool_grammar.h"

#include <optional>

namespace moesaic::server {
namespace {

// What stands around the name and the arguments of a call, and around all calls.
struct Frame {
  const char *section_open, *call_open, *before_name, *between, *after_arguments, *call_close, *section_close;
  bool numbered = false;  // the name is followed by the call's number
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

// Literal text as Lark terms. Special tokens inside it are named by id, as text cannot spell them; "\n?" is a
// line break that may be left out.
class Terms {
 public:
  explicit Terms(const text::Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  std::string Of(std::string_view text) const {
    std::string terms;
    while (!text.empty()) {
      if (text.starts_with("\n?")) {
        terms += " \"\\n\"?";
        text.remove_prefix(2);
        continue;
      }
      const size_t mark = MarkAtStart(text);
      if (mark > 0) {
        terms += fmt::format(" <[{}]>", *tokenizer_.TokenToId(text.substr(0, mark)));
        text.remove_prefix(mark);
        continue;
      }
      size_t end = 1;
      while (end < text.size() && MarkAtStart(text.substr(end)) == 0 && !text.substr(end).starts_with("\n?"))
        ++end;
      terms += fmt::format(" {}", Dump(Json(std::string(text.substr(0, end)))));
      text.remove_prefix(end);
    }
    return terms;
  }

 private:
  // Length of the special token that `text` begins with; 0: none.
  size_t MarkAtStart(std::string_view text) const {
    if (text.front() != '<') return 0;
    const size_t end = text.find('>');
    if (end == std::string_view::npos) return 0;
    const auto id = tokenizer_.TokenToId(text.substr(0, end + 1));
    return id && tokenizer_.IsSpecial(*id) ? end + 1 : 0;
  }

  const text::Tokenizer& tokenizer_;
};

Json SchemaOf(const Json& function) {
  const auto found = function.find("parameters");
  if (found == function.end() || !found->is_object() || found->empty()) return {{"type", "object"}};
  return *found;
}

}  // namespace

StatusOr<std::string> ToolGrammar(text::ToolFormat format, const text::Tokenizer& tokenizer,
                                  const Conversation& conversation) {
  const std::optional<Frame> frame = FrameOf(format);
  if (!frame) {
    return Unimplemented("'tool_choice': a call cannot be forced with tool format '{}'", text::Name(format));
  }
  const Terms terms(tokenizer);
  std::string calls, rules;
  int count = 0;
  for (const Json& tool : conversation.tools) {
    const Json& function = tool["function"];
    const auto& name = function["name"].get_ref<const std::string&>();
    if (conversation.tool_use == ToolUse::kNamed && name != conversation.tool_name) continue;
    calls += fmt::format("{}call_{}", count == 0 ? "" : " | ", count);
    rules += fmt::format("call_{}:{}{}{}{} arguments_{}{}{}\n", count, terms.Of(frame->call_open),
                         terms.Of(frame->before_name + name), frame->numbered ? " \":\" /[0-9]{1,4}/" : "",
                         terms.Of(frame->between), count, terms.Of(frame->after_arguments),
                         terms.Of(frame->call_close));
    rules += fmt::format("arguments_{}: %json {}\n", count, Dump(SchemaOf(function)));
    ++count;
  }
  const bool several = conversation.tool_use != ToolUse::kNamed && conversation.parallel_calls &&
                       format != text::ToolFormat::kLlama3;
  std::string grammar = "start:" + terms.Of(frame->section_open) + " call";
  if (several) grammar += " (\"\\n\"? call)*";
  return grammar + terms.Of(frame->section_close) + "\ncall: " + calls + "\n" + rules;
}

}  // namespace moesaic::server
