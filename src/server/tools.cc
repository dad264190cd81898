#include "server/tools.h"

#include <algorithm>
#include <utility>

#include "server/api_error.h"

namespace moesaic::server {
namespace {

Status Missing(const std::string& path) {
  return FieldError(path, "missing_required_parameter",
                    fmt::format("Missing required parameter: '{}'.", path));
}

// Checks a name, which the prompt shows and calls of the model contain.
Status CheckName(const Conversation& conversation, const std::string& name, const std::string& path) {
  if (name.empty() || name.size() > 256 || name.find_first_of("\r\n<>\"") != std::string::npos) {
    return FieldError(path, "invalid_value",
                      fmt::format("Invalid '{}': a name of 1 to 256 letters, found \"{}\"", path, name));
  }
  if (HasTool(conversation, name)) {
    return FieldError(path, "invalid_value",
                      fmt::format("Invalid '{}': another tool has the name '{}' already", path, name));
  }
  return OkStatus();
}

// Checks that the schema describes an object, since the arguments of a call are one.
Status CheckSchema(const Json& schema, const std::string& path) {
  Fields fields(schema, path);
  std::string type = "object";
  fields.String("type", &type);
  if (type != "object") {
    fields.Fail("type", "invalid_value",
                fmt::format("Invalid '{}.type': the arguments of a function are of type 'object', found '{}'",
                            path, type));
  }
  return fields.status();
}

// Selects the members that the prompt shows, for APIs that describe the function among the tool's other
// members.
Json ShownOf(const Json& tool, const ToolForm& form) {
  Json shown = Json::object();
  for (const auto& [name, value] : tool.items()) {
    if (name == "name" || name == "description") shown[name] = value;
    if (name == form.schema) shown["parameters"] = value;
  }
  return shown;
}

// Checks the function at `path` and adds it to the conversation.
Status AddTool(const Json& function, const std::string& path, const ToolForm& form,
               Conversation* conversation) {
  Fields fields(function, path);
  std::string name, description;
  fields.String("name", &name);
  fields.String("description", &description);
  const Json* schema = fields.Object(form.schema);
  RETURN_IF_ERROR(fields.status());
  if (!fields.Has("name")) return Missing(path + ".name");
  RETURN_IF_ERROR(CheckName(*conversation, name, path + ".name"));
  if (schema != nullptr) RETURN_IF_ERROR(CheckSchema(*schema, fields.Path(form.schema)));
  if (schema == nullptr && form.needs_schema) return Missing(fields.Path(form.schema));
  Json shown = form.holder == nullptr ? ShownOf(function, form) : function;
  shown.erase("strict");
  // Clients may leave these out, but some templates read them without a check.
  if (Json& words = shown["description"]; words.is_null()) words = "";
  if (Json& object = shown["parameters"]; object.is_null()) {
    object = {{"type", "object"}, {"properties", Json::object()}};
  }
  conversation->tools.push_back({{"type", "function"}, {"function", std::move(shown)}});
  return OkStatus();
}

Status ReadTool(const Json& json, const std::string& path, const ToolForm& form, Conversation* conversation) {
  Fields tool(json, path);
  std::string type = form.type;
  tool.String("type", &type);
  if (tool.ok() && type != form.type) {
    tool.Fail("type", "invalid_value",
              fmt::format("Invalid '{}.type': only '{}' is known here, found '{}'", path, form.type, type));
  }
  if (form.holder == nullptr) {
    RETURN_IF_ERROR(tool.status());
    return AddTool(json, path, form, conversation);
  }
  const Json* function = tool.Object(form.holder);
  RETURN_IF_ERROR(tool.status());
  if (function == nullptr) return Missing(tool.Path(form.holder));
  return AddTool(*function, tool.Path(form.holder), form, conversation);
}

}  // namespace

void ReadTools(Fields& body, const ToolForm& form, Conversation* conversation) {
  const Json* tools = body.Array("tools");
  if (tools == nullptr) return;
  if (tools->size() > kMaxTools) {
    return body.Fail("tools", "array_above_max_length",
                     fmt::format("Invalid 'tools': at most {}, found {}", kMaxTools, tools->size()));
  }
  for (size_t i = 0; body.ok() && i < tools->size(); ++i) {
    body.Merge(ReadTool((*tools)[i], fmt::format("tools[{}]", i), form, conversation));
  }
  if (!conversation->tools.empty()) conversation->tool_use = ToolUse::kAuto;
}

bool HasTool(const Conversation& conversation, const std::string& name) {
  return std::any_of(conversation.tools.begin(), conversation.tools.end(),
                     [&name](const Json& tool) { return tool["function"]["name"] == name; });
}

}  // namespace moesaic::server
