#include "server/json_fields.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "server/api_error.h"

namespace moesaic::server {
namespace {

constexpr int kMaxDepth = 64;
// Objects keep their members in a list, and each new member is compared with all others. Without a limit, a
// body of many members would take quadratic time.
constexpr int kMaxMembers = 1024;

// Counts brackets and commas outside strings. The parser refuses text that is not JSON.
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
      case '\0':  // the parser would end the text here
        return FieldError("", "invalid_json", "the body is not valid JSON: it has a NUL byte");
      default:
        break;
    }
  }
  return OkStatus();
}

// An integer that 64 bits cannot hold is stored as its digits, in JSON's type for binary values.
Json WideInteger(const std::string& digits) { return Json::binary({digits.begin(), digits.end()}); }

bool HasWideInteger(const Json& json) {
  if (!json.is_structured()) return json.is_binary();
  return std::any_of(json.begin(), json.end(), HasWideInteger);
}

std::string DumpPlain(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

void Write(const Json& json, const char* comma, const char* colon, std::string* text) {
  if (json.is_binary()) {
    text->append(json.get_binary().begin(), json.get_binary().end());
  } else if (json.is_structured()) {
    *text += json.is_object() ? '{' : '[';
    bool first = true;
    for (const auto& [key, value] : json.items()) {
      if (!std::exchange(first, false)) *text += comma;
      if (json.is_object()) *text += DumpPlain(key) + colon;
      Write(value, comma, colon, text);
    }
    *text += json.is_object() ? '}' : ']';
  } else {
    *text += DumpPlain(json);
  }
}

// Builds values from the parser's events as Json::parse does, but keeps the digits of wide integers.
class JsonBuilder : public nlohmann::json_sax<Json> {
 public:
  explicit JsonBuilder(Json* root) : root_(root) {}
  const std::string& error() const { return error_; }

  bool null() override { return Add(nullptr); }
  bool boolean(bool value) override { return Add(value); }
  bool number_integer(number_integer_t value) override { return Add(value); }
  bool number_unsigned(number_unsigned_t value) override { return Add(value); }
  bool number_float(number_float_t value, const string_t& digits) override {
    const bool integer = digits.find_first_not_of("-0123456789") == std::string::npos;
    return Add(integer ? WideInteger(digits) : Json(value));
  }
  bool string(string_t& value) override { return Add(std::move(value)); }
  bool binary(binary_t&) override { return false; }  // JSON text has no binary values
  bool start_object(size_t) override { return Open(Json::object()); }
  bool start_array(size_t) override { return Open(Json::array()); }
  bool key(string_t& name) override {
    member_ = &(*open_.back())[name];
    return true;
  }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& error) override {
    error_ = error.what();
    if (const size_t bracket = error_.find("] "); bracket != std::string::npos) error_.erase(0, bracket + 2);
    return false;
  }

 private:
  Json* Put(Json value) {
    if (open_.empty()) {
      *root_ = std::move(value);
      return root_;
    }
    if (open_.back()->is_array()) {
      open_.back()->push_back(std::move(value));
      return &open_.back()->back();
    }
    *member_ = std::move(value);
    return member_;
  }
  bool Add(Json value) {
    Put(std::move(value));
    return true;
  }
  bool Open(Json value) {
    open_.push_back(Put(std::move(value)));
    return true;
  }
  bool Close() {
    open_.pop_back();
    return true;
  }

  Json* const root_;
  std::vector<Json*> open_;  // arrays and objects that contain the next value
  Json* member_ = nullptr;   // value of the last key of the innermost object
  std::string error_;
};

}  // namespace

StatusOr<Json> ParseJson(std::string_view text) {
  RETURN_IF_ERROR(CheckShape(text));
  Json json;
  JsonBuilder builder(&json);
  if (!Json::sax_parse(text, &builder)) {
    return FieldError("", "invalid_json", "the body is not valid JSON: " + builder.error());
  }
  return json;
}

Json ParseDumped(std::string_view text) {
  Json json;
  JsonBuilder builder(&json);
  MOESAIC_CHECK(Json::sax_parse(text, &builder));
  return json;
}

std::string Dump(const Json& json) {
  if (!HasWideInteger(json)) return DumpPlain(json);
  std::string text;
  Write(json, ",", ":", &text);
  return text;
}

std::string DumpSpaced(const Json& json) {
  std::string text;
  Write(json, ", ", ": ", &text);
  return text;
}

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
    case Json::value_t::binary:
      return "an integer of more than 64 bits";
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
