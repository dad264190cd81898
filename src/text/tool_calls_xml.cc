#include "text/tool_calls_xml.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "text/markers.h"

namespace moesaic::text {
namespace {

using Json = nlohmann::json;

std::string Quoted(const std::string& text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

// One line break after the opening and before the closing marker belongs to the markers.
std::string Unwrapped(std::string_view text) {
  if (text.starts_with('\n')) text.remove_prefix(1);
  if (text.ends_with('\n')) text.remove_suffix(1);
  return std::string(text);
}

const char* TypeName(const Json& value) {
  if (value.is_string()) return "string";
  if (value.is_boolean()) return "boolean";
  if (value.is_number_integer()) return "integer";
  if (value.is_number()) return "number";
  if (value.is_null()) return "null";
  return value.is_array() ? "array" : "object";
}

bool AddTypes(const Json& schema, const Json& root, int depth, std::set<std::string>* types);

// Adds the types of the schema that a "$ref" names.
bool AddReferenced(const std::string& reference, const Json& root, int depth, std::set<std::string>* types) {
  if (!reference.starts_with("#/") || reference.find('%') != std::string::npos) return false;
  try {
    const Json::json_pointer pointer(reference.substr(1));
    return root.contains(pointer) && AddTypes(root[pointer], root, depth + 1, types);
  } catch (const Json::exception&) {
    return false;
  }
}

// Adds the types that a parameter's schema allows. Returns false if it may allow others, too.
bool AddTypes(const Json& schema, const Json& root, int depth, std::set<std::string>* types) {
  constexpr int kMaxDepth = 16;
  if (!schema.is_object() || depth > kMaxDepth) return false;
  if (const auto type = schema.find("type"); type != schema.end()) {
    for (const Json& one : type->is_array() ? *type : Json::array({*type})) {
      if (!one.is_string()) return false;
      types->insert(one.get<std::string>());
    }
    return true;
  }
  if (const auto value = schema.find("const"); value != schema.end()) {
    types->insert(TypeName(*value));
    return true;
  }
  if (const auto values = schema.find("enum"); values != schema.end() && values->is_array()) {
    for (const Json& value : *values) types->insert(TypeName(value));
    return true;
  }
  for (const char* several : {"anyOf", "oneOf"}) {
    const auto schemas = schema.find(several);
    if (schemas == schema.end() || !schemas->is_array()) continue;
    return std::ranges::all_of(*schemas,
                               [&](const Json& one) { return AddTypes(one, root, depth + 1, types); });
  }
  const auto reference = schema.find("$ref");
  return reference != schema.end() && reference->is_string() &&
         AddReferenced(reference->get<std::string>(), root, depth, types);
}

std::map<std::string, std::map<std::string, std::set<std::string>>> ReadTypes(std::string_view tools_json) {
  std::map<std::string, std::map<std::string, std::set<std::string>>> types;
  const Json tools = Json::parse(tools_json, nullptr, /*allow_exceptions=*/false);
  if (!tools.is_array()) return types;
  for (const Json& tool : tools) {
    if (!tool.is_object()) continue;
    const Json& function = tool.contains("function") ? tool["function"] : tool;
    if (!function.is_object() || !function.contains("name") || !function["name"].is_string()) continue;
    const Json parameters = function.value("parameters", Json());
    if (!parameters.is_object() || !parameters.contains("properties")) continue;
    const Json& properties = parameters["properties"];
    if (!properties.is_object()) continue;
    for (const auto& [key, schema] : properties.items()) {
      std::set<std::string> allowed;
      if (AddTypes(schema, parameters, 0, &allowed)) types[function["name"]][key] = std::move(allowed);
    }
  }
  return types;
}

}  // namespace

XmlCallParser::XmlCallParser(const XmlCallFormat& format, std::string_view tools_json)
    : format_(format), types_(ReadTypes(tools_json)) {}

void XmlCallParser::Push(std::string_view piece, ToolDelta* delta) {
  held_.append(piece);
  while (Step(delta)) {
  }
}

bool XmlCallParser::Step(ToolDelta* delta) {
  switch (state_) {
    case State::kText:
      return StepText(delta);
    case State::kSection:
      return StepSection(delta);
    case State::kName:
      return StepName(delta);
    case State::kCall:
      return StepCall(delta);
    case State::kKey:
      return StepKey();
    case State::kValue:
      return StepValue(delta);
  }
  return false;
}

void XmlCallParser::Finish(ToolDelta* delta) {
  if (state_ == State::kText) {
    if (!called_ || held_.find_first_not_of(kSpace) != std::string::npos) delta->content += held_;
  } else if (state_ == State::kName) {
    delta->content += raw_ + held_;
  } else if (state_ == State::kCall && parameters_ == 0) {
    Arguments(delta, "{}");  // the model may have left out the closing marks
  } else if (state_ != State::kSection && parameters_ == 0) {
    Arguments(delta, "{");  // truncated in the first one: not a call without arguments
  }
  held_.clear();
}

bool XmlCallParser::StepText(ToolDelta* delta) {
  const std::string_view open = format_.section_open.empty() ? format_.call_open : format_.section_open;
  const size_t at = held_.find(open);
  const bool found = at != std::string::npos;
  const size_t moved = MoveText(&held_, found ? at : held_.size() - BegunAtEnd(held_, open), &delta->content);
  if (!found) return false;
  held_.erase(0, at - moved + format_.section_open.size());
  raw_ = format_.section_open;
  state_ = State::kSection;
  return true;
}

bool XmlCallParser::StepSection(ToolDelta* delta) {
  const std::initializer_list<std::string_view> marks = {format_.call_open, format_.section_close,
                                                         format_.section_open, format_.call_close};
  MoveText(&held_, std::min(FindMark(held_, marks).at, held_.size() - BegunAtEnd(held_, marks)),
           &delta->content);
  const FoundMark found = FindMark(held_, marks);
  if (found.mark.empty()) return false;
  held_.erase(0, found.at + found.mark.size());
  if (found.mark == format_.section_close) {
    called_ = true;
    state_ = State::kText;
    return true;
  }
  if (found.mark != format_.call_open) return true;  // a repeated mark is no text
  raw_ += found.mark;
  parameters_ = 0;
  state_ = State::kName;
  return true;
}

bool XmlCallParser::StepName(ToolDelta* delta) {
  const FoundMark found = FindMark(held_, {format_.call_open_end, format_.param_open, format_.call_close});
  if (found.mark.empty()) return false;
  name_ = Trimmed(std::string_view(held_).substr(0, found.at));
  if (name_.empty()) {
    delta->content += std::exchange(raw_, {});
    state_ = State::kText;
    return true;
  }
  held_.erase(0, found.at + (found.mark == format_.call_open_end ? found.mark.size() : 0));
  raw_.clear();
  ++calls_;
  delta->calls.push_back({calls_ - 1, "", name_, ""});
  state_ = State::kCall;
  return true;
}

bool XmlCallParser::StepCall(ToolDelta* delta) {
  const FoundMark found = FindMark(held_, {format_.param_open, format_.call_close, format_.section_close});
  if (found.mark.empty()) {
    held_.erase(
        0, held_.size() - BegunAtEnd(held_, {format_.param_open, format_.call_close, format_.section_close}));
    return false;
  }
  if (found.mark == format_.param_open) {
    held_.erase(0, found.at + found.mark.size());
    state_ = State::kKey;
    return true;
  }
  held_.erase(0, found.at + (found.mark == format_.call_close ? found.mark.size() : 0));
  EndCall(delta);
  return true;
}

void XmlCallParser::EndCall(ToolDelta* delta) {
  Arguments(delta, parameters_ == 0 ? "{}" : "}");
  called_ = true;
  state_ = format_.section_open.empty() ? State::kText : State::kSection;
}

bool XmlCallParser::StepKey() {
  const std::string_view end = format_.value_open.empty() ? format_.param_open_end : format_.value_open;
  const size_t at = held_.find(end);
  if (at == std::string::npos) return false;
  std::string key = held_.substr(0, at);
  held_.erase(0, at + end.size());
  if (!format_.value_open.empty()) key.erase(std::min(key.find(format_.param_open_end), key.size()));
  if (format_.typed_keys) {  // KEY" string="true
    is_string_ = key.ends_with("true");
    key.erase(std::min(key.find('"'), key.size()));
  }
  key_ = Trimmed(key);
  state_ = State::kValue;
  return true;
}

bool XmlCallParser::StepValue(ToolDelta* delta) {
  const size_t at = held_.find(format_.param_close);
  if (at == std::string::npos) return false;
  const std::string value = ValueJson(held_.substr(0, at));
  held_.erase(0, at + format_.param_close.size());
  Arguments(delta, fmt::format("{}{}: {}", parameters_ == 0 ? "{" : ", ", Quoted(key_), value));
  ++parameters_;
  state_ = State::kCall;
  return true;
}

std::string XmlCallParser::ValueJson(const std::string& text) const {
  if (format_.typed_keys) return is_string_ || !Json::accept(text) ? Quoted(text) : text;
  const std::string value = Unwrapped(text);
  std::set<std::string> types;
  if (const auto tool = types_.find(name_); tool != types_.end()) {
    if (const auto found = tool->second.find(key_); found != tool->second.end()) types = found->second;
  }
  if (types.size() == 1 && types.contains("string")) return Quoted(value);
  // Templates print Python's words for these values.
  const std::string json = value == "True"    ? "true"
                           : value == "False" ? "false"
                           : value == "None"  ? "null"
                                              : value;
  const Json parsed = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (parsed.is_discarded()) return Quoted(value);
  if (!types.contains("string")) return json;
  const std::string type = TypeName(parsed);
  return types.contains(type) || (type == "integer" && types.contains("number")) ? json : Quoted(value);
}

void XmlCallParser::Arguments(ToolDelta* delta, std::string text) {
  delta->calls.push_back({calls_ - 1, "", "", std::move(text)});
}

}  // namespace moesaic::text
