#include "server/json_fields.h"

#include <utility>

#include "server/api_error.h"

namespace moesaic::server {
namespace {

constexpr int kMaxDepth = 64;
// Objects keep their members in a list, in which each new one is looked for: without a bound, a body of many
// members would cost its length squared.
constexpr int kMaxMembers = 1024;

// Looks at brackets and commas outside strings; what is not JSON is the parser's to refuse.
Status CheckShape(std::string_view text) {
  std::vector<std::pair<char, int>> open;  // bracket, commas
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
      continue;
    }
    switch (c) {
      case '"':
        in_string = true;
        break;
      case '{':
      case '[':
        open.emplace_back(c, 0);
        if (open.size() > kMaxDepth) {
          return FieldError("", "invalid_json",
                            fmt::format("the JSON is nested deeper than {} levels", kMaxDepth));
        }
        break;
      case '}':
      case ']':
        if (!open.empty()) open.pop_back();
        break;
      case ',':
        if (!open.empty() && open.back().first == '{' && ++open.back().second >= kMaxMembers) {
          return FieldError("", "invalid_json",
                            fmt::format("an object has more than {} members", kMaxMembers));
        }
        break;
      case '\0':  // the parser would take it for the end
        return FieldError("", "invalid_json", "the body is not valid JSON: it has a NUL byte");
      default:
        break;
    }
  }
  return OkStatus();
}

}  // namespace

StatusOr<Json> ParseJson(std::string_view text) {
  RETURN_IF_ERROR(CheckShape(text));
  try {
    return Json::parse(text);
  } catch (const Json::exception& error) {
    std::string what = error.what();
    if (const size_t bracket = what.find("] "); bracket != std::string::npos) what = what.substr(bracket + 2);
    return FieldError("", "invalid_json", "the body is not valid JSON: " + what);
  }
}

std::string Dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

const char* KindOf(const Json& json) {
  switch (json.type()) {
    case Json::value_t::null:
      return "null";
    case Json::value_t::object:
      return "an object";
    case Json::value_t::array:
      return "an array";
    case Json::value_t::string:
      return "a string";
    case Json::value_t::boolean:
      return "a boolean";
    case Json::value_t::number_float:
      return "a decimal";
    default:
      return "an integer";
  }
}

Status TypeError(const std::string& path, const char* expected, const Json& found) {
  return FieldError(
      path, "invalid_type",
      fmt::format("Invalid type for '{}': expected {}, but got {} instead.", path, expected, KindOf(found)));
}

Fields::Fields(const Json& object, std::string path) : object_(object), path_(std::move(path)) {
  if (!object_.is_object()) {
    status_ = path_.empty()
                  ? FieldError("", "invalid_type",
                               fmt::format("the body must be a JSON object, found {}", KindOf(object_)))
                  : TypeError(path_, "an object", object_);
  }
}

std::string Fields::Path(const char* name) const { return path_.empty() ? name : path_ + "." + name; }

const Json* Fields::Any(const char* name) const {
  if (!status_.ok()) return nullptr;
  const auto found = object_.find(name);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

void Fields::Fail(const char* name, const std::string& code, const std::string& message) {
  if (status_.ok()) status_ = FieldError(Path(name), code, message);
}

void Fields::FailType(const char* name, const char* expected, const Json& found) {
  if (status_.ok()) status_ = TypeError(Path(name), expected, found);
}

void Fields::Merge(const Status& status) {
  if (status_.ok()) status_ = status;
}

void Fields::Bool(const char* name, bool* value) {
  const Json* found = Any(name);
  if (found == nullptr) return;
  if (!found->is_boolean()) return FailType(name, "a boolean", *found);
  *value = found->get<bool>();
}

void Fields::Int(const char* name, int64_t min, int64_t max, int64_t* value) {
  const Json* found = Any(name);
  if (found == nullptr) return;
  if (!found->is_number_integer()) return FailType(name, "an integer", *found);
  const bool huge = found->is_number_unsigned() && found->get<uint64_t>() > INT64_MAX;
  const int64_t number = huge ? 0 : found->get<int64_t>();
  if (huge || number < min || number > max) {
    return Fail(name, "invalid_value",
                fmt::format("Invalid '{}': must be between {} and {}, found {}", Path(name), min, max,
                            found->dump()));
  }
  *value = number;
}

void Fields::Int(const char* name, int min, int max, int* value) {
  int64_t wide = *value;
  Int(name, int64_t{min}, int64_t{max}, &wide);
  *value = static_cast<int>(wide);
}

void Fields::Float(const char* name, double min, double max, float* value) {
  const Json* found = Any(name);
  if (found == nullptr) return;
  if (!found->is_number()) return FailType(name, "a decimal", *found);
  const double number = found->get<double>();
  if (!(number >= min && number <= max)) {
    return Fail(name, "invalid_value",
                fmt::format("Invalid '{}': must be between {} and {}, found {}", Path(name), min, max,
                            found->dump()));
  }
  *value = static_cast<float>(number);
}

void Fields::ShareAbove0(const char* name, float* value) {
  Float(name, 0, 1, value);
  if (ok() && *value <= 0) {
    Fail(name, "invalid_value",
         fmt::format("Invalid '{}': must be above 0 and at most 1, found 0", Path(name)));
  }
}

void Fields::String(const char* name, std::string* value) {
  const Json* found = Any(name);
  if (found == nullptr) return;
  if (!found->is_string()) return FailType(name, "a string", *found);
  *value = found->get<std::string>();
}

const Json* Fields::Object(const char* name) {
  const Json* found = Any(name);
  if (found == nullptr || found->is_object()) return found;
  FailType(name, "an object", *found);
  return nullptr;
}

const Json* Fields::Array(const char* name) {
  const Json* found = Any(name);
  if (found == nullptr || found->is_array()) return found;
  FailType(name, "an array", *found);
  return nullptr;
}

void Fields::Strings(const char* name, size_t most, std::vector<std::string>* values) {
  const Json* found = Any(name);
  if (found == nullptr) return;
  if (found->is_string()) {
    *values = {found->get<std::string>()};
    return;
  }
  if (!found->is_array()) return FailType(name, "a string or an array of strings", *found);
  if (found->size() > most) {
    return Fail(name, "array_above_max_length",
                fmt::format("Invalid '{}': at most {} strings, found {}", Path(name), most, found->size()));
  }
  values->clear();
  for (size_t i = 0; i < found->size(); ++i) {
    const Json& item = (*found)[i];
    if (!item.is_string()) return Merge(TypeError(fmt::format("{}[{}]", Path(name), i), "a string", item));
    values->push_back(item.get<std::string>());
  }
}

}  // namespace moesaic::server
