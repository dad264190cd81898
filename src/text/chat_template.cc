#include "text/chat_template.h"

#include <nlohmann/json.hpp>

#include "text/bridge.h"
#include "text/file.h"
#include "text/tokenizer_config.h"

namespace moesaic::text {

using Json = nlohmann::ordered_json;

struct ChatTemplate::Compiled {
  rust::Box<bridge::Template> bridge;
  std::string source;
};

namespace {

template <typename Compiled>
StatusOr<std::shared_ptr<const Compiled>> Compile(std::string_view source) {
  return Bridged([&] {
    return std::shared_ptr<const Compiled>(
        new Compiled{bridge::template_from_source(Bytes(source)), std::string(source)});
  });
}

/// Adds `"name": value` to the text of a JSON object without its closing brace. `value` is untrusted JSON
/// text, so it must be validated as one value.
Status AddMember(std::string* members, const std::string& name, std::string_view value) {
  if (!Json::accept(value)) return InvalidArgument("{} is not JSON", name);
  if (members->size() > 1) *members += ',';
  *members += Json(name).dump();
  *members += ':';
  *members += value;
  return OkStatus();
}

/// Appends the members of the JSON object `object`.
Status AddMembers(std::string* members, std::string_view object) {
  if (!Json::accept(object)) return InvalidArgument("the template's variables are not JSON");
  const size_t open = object.find_first_not_of(" \t\r\n");
  const size_t close = object.find_last_of('}');
  if (object[open] != '{') return InvalidArgument("the template's variables are not a JSON object");
  const std::string_view inner = object.substr(open + 1, close - open - 1);
  if (inner.find_first_not_of(" \t\r\n") == std::string_view::npos) return OkStatus();
  if (members->size() > 1) *members += ',';
  *members += inner;
  return OkStatus();
}

/// Returns `text` as a JSON string; bytes that are no UTF-8 are replaced.
std::string QuotedToken(const std::string& text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

template <typename Compiled>
StatusOr<std::string> RenderWith(const Compiled& compiled, std::string_view variables,
                                 std::string_view messages, const RenderOptions& options, bool aliases) {
  return Bridged([&] {
    return ToString(compiled.bridge->render(Bytes(variables), Bytes(messages),
                                            options.mutation == Mutation::kAllowed, options.now.value_or(-1),
                                            aliases));
  });
}

}  // namespace

StatusOr<ChatTemplate> ChatTemplate::FromSource(std::string_view source) {
  ChatTemplate made;
  ASSIGN_OR_RETURN(made.default_, Compile<Compiled>(source));
  return made;
}

StatusOr<ChatTemplate> ChatTemplate::FromConfig(std::string_view tokenizer_config_json) {
  ASSIGN_OR_RETURN(const TokenizerConfig config, TokenizerConfig::Parse(tokenizer_config_json));
  const auto default_template = config.chat_templates.find("default");
  if (default_template == config.chat_templates.end()) {
    return NotFound("tokenizer_config.json: no \"chat_template\"");
  }
  ASSIGN_OR_RETURN(ChatTemplate made, FromSource(default_template->second));
  if (const auto tools = config.chat_templates.find("tool_use"); tools != config.chat_templates.end()) {
    ASSIGN_OR_RETURN(made.tool_use_, Compile<Compiled>(tools->second));
  }
  for (const auto& [role, text] : config.roles) made.SetToken(role, text);
  return made;
}

StatusOr<ChatTemplate> ChatTemplate::FromFolder(const std::filesystem::path& folder) {
  std::string config = "{}";
  ASSIGN_OR_RETURN(config, ReadIfThere(folder / "tokenizer_config.json", config));
  StatusOr<std::string> source = ReadFile(folder / "chat_template.jinja");
  if (!source.ok()) {
    if (source.status().code() != StatusCode::kNotFound) return source.status();
    if (StatusOr<std::string> file = ReadFile(folder / "chat_template.json"); file.ok()) {
      const Json json = Json::parse(*file, nullptr, false);
      if (!json.is_object() || !json.contains("chat_template") || !json["chat_template"].is_string()) {
        return InvalidArgument("{}: no \"chat_template\"", (folder / "chat_template.json").string());
      }
      source = json["chat_template"].get<std::string>();
    }
  }
  StatusOr<ChatTemplate> made = source.ok() ? FromSource(*source) : FromConfig(config);
  if (!made.ok()) return Annotate(made.status(), folder.string());
  if (source.ok()) {
    ASSIGN_OR_RETURN(const TokenizerConfig parsed, TokenizerConfig::Parse(config));
    for (const auto& [role, text] : parsed.roles) made->SetToken(role, text);
    ASSIGN_OR_RETURN(const std::string tools,
                     ReadIfThere(folder / "additional_chat_templates" / "tool_use.jinja", ""));
    if (!tools.empty()) {
      ASSIGN_OR_RETURN(made->tool_use_, Compile<Compiled>(tools));
    }
  }
  return made;
}

void ChatTemplate::SetToken(std::string name, std::string text) {
  std::erase_if(tokens_, [&](const auto& token) { return token.first == name; });
  tokens_.emplace_back(std::move(name), std::move(text));
  token_members_.clear();
  for (const auto& [key, value] : tokens_) {
    if (!token_members_.empty()) token_members_ += ',';
    token_members_ += QuotedToken(key) + ':' + QuotedToken(value);
  }
}

const ChatTemplate::Compiled& ChatTemplate::TemplateFor(const ChatInput& input) const {
  return !input.tools_json.empty() && tool_use_ != nullptr ? *tool_use_ : *default_;
}

StatusOr<std::string> ChatTemplate::Variables(const ChatInput& input) const {
  std::string members = "{" + token_members_;
  members += token_members_.empty() ? "" : ",";
  members +=
      input.add_generation_prompt ? R"("add_generation_prompt":true)" : R"("add_generation_prompt":false)";
  for (const auto& [name, json] :
       {std::pair("tools", &input.tools_json), {"documents", &input.documents_json}}) {
    if (json->empty()) {
      members.append(",\"").append(name).append("\":null");
    } else {
      RETURN_IF_ERROR(AddMember(&members, name, *json));
    }
  }
  if (!input.variables_json.empty()) RETURN_IF_ERROR(AddMembers(&members, input.variables_json));
  return members += '}';
}

StatusOr<std::string> ChatTemplate::Render(const ChatInput& input, const RenderOptions& options) const {
  if (input.messages_json.empty()) return InvalidArgument("messages is not JSON");
  ASSIGN_OR_RETURN(const std::string variables, Variables(input));
  return RenderWith(TemplateFor(input), variables, input.messages_json, options, true);
}

StatusOr<TemplateText> ChatTemplate::RenderWithHoles(const ChatInput& input, std::string_view messages,
                                                     const RenderOptions& options) const {
  ASSIGN_OR_RETURN(const std::string variables, Variables(input));
  return Bridged([&] {
    const bridge::TemplateText rendered = TemplateFor(input).bridge->render_with_holes(
        Bytes(variables), Bytes(messages), options.mutation == Mutation::kAllowed, options.now.value_or(-1));
    TemplateText text{.text = ToString(rendered.text), .holes = {}};
    text.holes.reserve(rendered.holes.size());
    for (const bridge::TemplateHole& hole : rendered.holes)
      text.holes.push_back({hole.at, messages.substr(hole.begin, hole.end - hole.begin)});
    return text;
  });
}

StatusOr<std::string> ChatTemplate::RenderVariables(std::string_view variables_json,
                                                    const RenderOptions& options) const {
  return RenderWith(*default_, variables_json, "", options, false);
}

const std::string& ChatTemplate::source() const { return default_->source; }

}  // namespace moesaic::text
