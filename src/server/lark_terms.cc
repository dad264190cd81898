#include "server/lark_terms.h"

#include "server/schema_keywords.h"

namespace moesaic::server {

constexpr std::string_view kMaybeBreak = "\n?";

std::string LarkTerms::Of(std::string_view text) const {
  std::string terms;
  while (!text.empty()) {
    if (text.starts_with(kMaybeBreak)) {
      terms += " \"\\n\"?";
      text.remove_prefix(kMaybeBreak.size());
      continue;
    }
    if (const size_t mark = MarkAtStart(text); mark > 0) {
      terms += fmt::format(" <[{}]>", *tokenizer_.TokenToId(text.substr(0, mark)));
      text.remove_prefix(mark);
      continue;
    }
    size_t end = 1;
    while (end < text.size() && MarkAtStart(text.substr(end)) == 0 &&
           !text.substr(end).starts_with(kMaybeBreak))
      ++end;
    terms += fmt::format(" {}", Dump(Json(std::string(text.substr(0, end)))));
    text.remove_prefix(end);
  }
  return terms;
}

std::pair<std::string_view, std::string_view> LarkTerms::SplitAtMark(std::string_view text) const {
  size_t at = 0;
  while (at < text.size() && MarkAtStart(text.substr(at)) == 0) ++at;
  return {text.substr(0, at), text.substr(at)};
}

size_t LarkTerms::MarkAtStart(std::string_view text) const {
  const auto special = [this](std::string_view mark) {
    const auto id = tokenizer_.TokenToId(mark);
    return id && tokenizer_.IsSpecial(*id);
  };
  if (text.front() == '<') {
    const size_t end = text.find('>');
    if (end != std::string_view::npos && special(text.substr(0, end + 1))) return end + 1;
  }
  for (const std::string_view mark : marks_) {
    if (!mark.empty() && text.starts_with(mark) && special(mark)) return mark.size();
  }
  return 0;
}

Json ParametersOf(const Json& function) {
  const auto found = function.find("parameters");
  if (found == function.end() || !found->is_object() || found->empty()) return {{"type", "object"}};
  return EnforceableSchema(*found, "tools");
}

bool MayCall(const Conversation& conversation, const std::string& name) {
  return conversation.tool_use != ToolUse::kNamed || name == conversation.tool_name;
}

bool MayCallSeveral(const Conversation& conversation) {
  return conversation.tool_use != ToolUse::kNamed && conversation.parallel_calls;
}

}  // namespace moesaic::server
