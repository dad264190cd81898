#include "server/prompt_template.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdint>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "server/api_error.h"
#include "server/json_fields.h"
#include "server/tracing.h"

namespace moesaic::server {
namespace {

constexpr size_t kShortIdLength = 9;

bool HasCalls(const Json& message) { return message.contains("tool_calls"); }

bool AnyCalls(const Json& messages) { return std::any_of(messages.begin(), messages.end(), HasCalls); }

// Converts the arguments of one call, JSON text or an object, to the form.
Json ArgumentsIn(const CallForm& form, const Json& arguments) {
  if (!arguments.is_string()) return form.text_arguments ? Json(DumpSpaced(arguments)) : arguments;
  const auto& text = arguments.get_ref<const std::string&>();
  if (text.empty()) return form.text_arguments ? Json("{}") : Json::object();
  if (form.text_arguments) return arguments;
  StatusOr<Json> parsed = ParseJson(text);
  return parsed.ok() && parsed->is_object() ? *std::move(parsed) : arguments;
}

// Returns the id itself where it has 9 letters or digits, else 9 digits that depend on the whole id. They are
// the same in each run, so that the prompt of a conversation keeps its cached blocks.
std::string ShortId(const std::string& id) {
  constexpr std::string_view kDigits = "0123456789abcdefghijklmnopqrstuvwxyz";
  const auto is_alnum = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0; };
  if (id.size() == kShortIdLength && std::all_of(id.begin(), id.end(), is_alnum)) return id;
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const char c : id) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211u;
  std::string digits;
  for (; digits.size() < kShortIdLength; hash /= kDigits.size()) digits += kDigits[hash % kDigits.size()];
  return digits;
}

// Copies `message` with calls in `form`, without its text.
Json CallsIn(const CallForm& form, const Json& message) {
  Json copy = Json::object();
  for (const auto& [name, value] : message.items()) {
    if (name != "content") {
      copy[name] = value;
    } else if (form.content != CallForm::Content::kAbsent) {
      copy[name] = form.content == CallForm::Content::kNull ? Json() : Json("");
    }
  }
  for (Json& call : copy["tool_calls"]) {
    if (form.short_ids) call["id"] = ShortId(call["id"]);
    Json& arguments = call["function"]["arguments"];
    arguments = ArgumentsIn(form, arguments);
  }
  return copy;
}

Json MessagesIn(const CallForm& form, const Json& messages) {
  Json all = Json::array();
  for (const Json& message : messages) {
    if (!HasCalls(message)) {
      all.push_back(message);
      Json& copy = all.back();
      if (form.short_ids && copy.contains("tool_call_id"))
        copy["tool_call_id"] = ShortId(copy["tool_call_id"]);
      continue;
    }
    Json calls = CallsIn(form, message);
    const Json& content = message["content"];
    if (content.get_ref<const std::string&>().empty()) {
      all.push_back(std::move(calls));
    } else if (form.split) {
      Json text = message;
      text.erase("tool_calls");
      all.push_back(std::move(text));
      calls.erase("reasoning_content");
      all.push_back(std::move(calls));
    } else {
      calls["content"] = content;
      all.push_back(std::move(calls));
    }
  }
  return all;
}

constexpr std::string_view kMark = "moesaic_call_";

std::string MarkOf(int call) { return fmt::format("{}{}_", kMark, call); }

// Returns the first call from 0 to `calls` - 1 whose mark is not in `text`, or `calls`. Reads the text once,
// since a history may have many calls.
int FirstUnmarked(std::string_view text, int calls) {
  std::vector<bool> found(static_cast<size_t>(calls));
  for (size_t at = 0; (at = text.find(kMark, at)) != std::string_view::npos;) {
    at += kMark.size();
    int call = 0;
    const auto [end, error] = std::from_chars(text.data() + at, text.data() + text.size(), call);
    const bool ends = error == std::errc() && end != text.data() + text.size() && *end == '_';
    if (ends && call >= 0 && call < calls) found[static_cast<size_t>(call)] = true;
  }
  return static_cast<int>(std::find(found.begin(), found.end(), false) - found.begin());
}

// Copies `messages` with a numbered mark instead of each call's arguments.
Json Marked(const Json& messages, int* calls) {
  Json copy = messages;
  for (Json& message : copy) {
    if (!HasCalls(message)) continue;
    for (Json& call : message["tool_calls"]) {
      const std::string mark = MarkOf((*calls)++);
      call["function"]["arguments"] = Json{{mark, mark}};
    }
  }
  return copy;
}

constexpr const char* kProbeValue = "moesaic value";
constexpr const char* kProbeKey = "moesaic_key";
constexpr const char* kProbeTools =
    R"([{"type": "function", "function": {"name": "moesaic_tool", "description": "A probe", "parameters":
    {"type": "object", "properties": {"moesaic_key": {"type": "string", "description": "A key"}},
    "required": ["moesaic_key"]}}}])";

constexpr const char* kShortProbeId = "moesaic00";
constexpr const char* kLongProbeId = "call_0123456789abcdef01234567";

// Returns a conversation with one call.
Json Probe(const std::string& text, const char* id) {
  const Json call = {{"id", id},
                     {"type", "function"},
                     {"function", {{"name", "moesaic_tool"}, {"arguments", Json{{kProbeKey, kProbeValue}}}}}};
  return Json::array({Json{{"role", "user"}, {"content", "moesaic question"}},
                      Json{{"role", "assistant"}, {"content", text}, {"tool_calls", Json::array({call})}},
                      Json{{"role", "tool"}, {"content", "moesaic result"}, {"tool_call_id", id}}});
}

// Quality of a rendering of the probe's arguments.
enum class Shown {
  kNot,      // left out, or the template raises an exception
  kEscaped,  // JSON text inside a JSON string
  kPython,   // a dictionary in Python's syntax
  kWell,     // JSON, or a format of the template
};

Shown ShownIn(const std::string& prompt) {
  const auto has = [&prompt](const std::string& part) { return prompt.find(part) != std::string::npos; };
  const std::string key = kProbeKey;
  if (!has(kProbeValue)) return Shown::kNot;
  if (has("\\\"" + key)) return Shown::kEscaped;
  if (has("'" + key + "'")) return Shown::kPython;
  return Shown::kWell;
}

StatusOr<std::string> RenderProbe(const text::ChatTemplate& chat, const CallForm& form,
                                  const std::string& text, const char* id = kShortProbeId) {
  text::ChatInput input;
  input.messages_json = Dump(MessagesIn(form, Probe(text, id)));
  input.tools_json = kProbeTools;
  input.add_generation_prompt = true;
  return chat.Render(input);
}

}  // namespace

std::string NewCallId(const CallForm& form) {
  return form.short_ids ? RandomHex(kShortIdLength) : "call_" + RandomHex(24);
}

CallForm ProbeCallForm(const text::ChatTemplate& chat) {
  if (chat.source().find("tool_calls") == std::string::npos) return {};
  using Content = CallForm::Content;
  CallForm best;
  Shown best_shown = Shown::kNot;
  size_t best_size = 0;
  for (const bool text_arguments : {false, true}) {
    for (const Content content : {Content::kEmpty, Content::kNull, Content::kAbsent}) {
      const CallForm form{.content = content, .text_arguments = text_arguments};
      const StatusOr<std::string> prompt = RenderProbe(chat, form, "");
      const Shown shown = prompt.ok() ? ShownIn(*prompt) : Shown::kNot;
      if (shown == Shown::kNot) continue;
      // The shortest rendering is the intended one. Others add an empty turn, or the word "None".
      const bool shorter = text_arguments == best.text_arguments && prompt->size() < best_size;
      if (shown > best_shown || (shown == best_shown && shorter)) {
        best = form;
        best_shown = shown;
        best_size = prompt->size();
      }
    }
  }
  const StatusOr<std::string> with_text = RenderProbe(chat, best, "moesaic text");
  best.split = best_shown != Shown::kNot && (!with_text.ok() || ShownIn(*with_text) == Shown::kNot);
  best.short_ids = best_shown != Shown::kNot && !RenderProbe(chat, best, "", kLongProbeId).ok();
  return best;
}

StatusOr<std::string> PromptTemplate::Render(const Json& messages, text::ChatInput input) const {
  input.messages_json = Dump(MessagesIn(form_, messages));
  StatusOr<std::string> prompt = chat_.Render(input);
  if (!prompt.ok()) {
    return FieldError("messages", "template_error",
                      "the chat template refuses this: " + Message(prompt.status()));
  }
  if (!AnyCalls(messages)) return prompt;
  // Renders the same conversation with a mark in each call. A template that fails on the marks reads calls.
  int calls = 0;
  input.messages_json = Dump(MessagesIn(form_, Marked(messages, &calls)));
  const StatusOr<std::string> marked = chat_.Render(input);
  if (!marked.ok()) return prompt;
  const int missing = FirstUnmarked(*marked, calls);
  if (missing == calls) return prompt;
  return FieldError(
      "messages", "template_error",
      fmt::format("the chat template leaves out tool call {} of {} in 'messages', so that the model would "
                  "not see it; send one call per message, followed by its result, and the tools as 'tools'",
                  missing + 1, calls));
}

}  // namespace moesaic::server
