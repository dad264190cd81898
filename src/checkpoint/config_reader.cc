#include "checkpoint/config_reader.h"

#include <algorithm>
#include <cmath>

#include "checkpoint/json_text.h"

namespace moesaic::checkpoint {
namespace {

std::string Listed(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "\"" : ", \"") + name + "\"";
  return text;
}

// Unsigned numbers beyond int64 would wrap around.
bool IsIntIn(const nlohmann::json& value, int64_t low, int64_t high) {
  if (!value.is_number_integer()) return false;
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) return false;
  return value.get<int64_t>() >= low && value.get<int64_t>() <= high;
}

}  // namespace

ConfigReader::ConfigReader(const nlohmann::json& object, std::string file)
    : object_(object), file_(std::move(file)) {
  if (!object_.is_object()) Fail(fmt::format("must be a JSON object, found {}", ShownJson(object_)));
}

bool ConfigReader::Has(const std::string& key) const {
  if (!object_.is_object()) return false;
  const auto found = object_.find(key);
  return found != object_.end() && !found->is_null();
}

void ConfigReader::Fail(std::string message) {
  if (fault_.ok()) fault_ = InvalidArgument("{}: {}", file_, message);
}

int64_t ConfigReader::Int(const std::string& key, int64_t low, int64_t high) {
  if (!Has(key)) {
    read_.insert(key);
    Fail(fmt::format("\"{}\" is missing", key));
    return low;
  }
  return IntOr(key, low, high, low);
}

int64_t ConfigReader::IntOr(const std::string& key, int64_t low, int64_t high, int64_t fallback) {
  read_.insert(key);
  if (!Has(key)) return fallback;
  const nlohmann::json& value = object_[key];
  if (!IsIntIn(value, low, high)) {
    Fail(fmt::format("\"{}\" must be an integer in [{}, {}], found {}", key, low, high, ShownJson(value)));
    return std::clamp(fallback, low, high);
  }
  return value.get<int64_t>();
}

double ConfigReader::Number(const std::string& key, double low, double high) {
  if (!Has(key)) {
    read_.insert(key);
    Fail(fmt::format("\"{}\" is missing", key));
    return low;
  }
  return NumberOr(key, low, high, low);
}

double ConfigReader::NumberOr(const std::string& key, double low, double high, double fallback) {
  read_.insert(key);
  if (!Has(key)) return fallback;
  const nlohmann::json& value = object_[key];
  const double number = value.is_number() ? value.get<double>() : NAN;
  if (!(number >= low && number <= high)) {  // also false for NaN
    Fail(fmt::format("\"{}\" must be a number in [{:g}, {:g}], found {}", key, low, high, ShownJson(value)));
    return fallback;
  }
  return number;
}

bool ConfigReader::BoolOr(const std::string& key, bool fallback) {
  read_.insert(key);
  if (!Has(key)) return fallback;
  const nlohmann::json& value = object_[key];
  if (!value.is_boolean()) {
    Fail(fmt::format("\"{}\" must be true or false, found {}", key, ShownJson(value)));
    return fallback;
  }
  return value.get<bool>();
}

std::string ConfigReader::StringOr(const std::string& key, const std::string& fallback) {
  read_.insert(key);
  if (!Has(key)) return fallback;
  const nlohmann::json& value = object_[key];
  if (!value.is_string()) {
    Fail(fmt::format("\"{}\" must be a string, found {}", key, ShownJson(value)));
    return fallback;
  }
  return value.get<std::string>();
}

std::vector<int64_t> ConfigReader::IntsOr(const std::string& key, int64_t low, int64_t high,
                                          std::vector<int64_t> fallback) {
  read_.insert(key);
  if (!Has(key)) return fallback;
  const nlohmann::json& value = object_[key];
  std::vector<int64_t> numbers;
  bool fits = value.is_array();
  for (size_t i = 0; fits && i < value.size(); ++i) {
    fits = IsIntIn(value[i], low, high);
    if (fits) numbers.push_back(value[i].get<int64_t>());
  }
  if (!fits) {
    Fail(fmt::format("\"{}\" must be a list of integers in [{}, {}], found {}", key, low, high,
                     ShownJson(value)));
    return fallback;
  }
  return numbers;
}

const nlohmann::json* ConfigReader::Object(const std::string& key) {
  read_.insert(key);
  if (!Has(key)) return nullptr;
  const nlohmann::json& value = object_[key];
  if (!value.is_object()) {
    Fail(fmt::format("\"{}\" must be an object, found {}", key, ShownJson(value)));
    return nullptr;
  }
  return &value;
}

void ConfigReader::OnlyString(const std::string& key, const std::vector<std::string>& allowed) {
  read_.insert(key);
  if (!Has(key)) return;
  const nlohmann::json& value = object_[key];
  if (!value.is_string() ||
      std::find(allowed.begin(), allowed.end(), value.get<std::string>()) == allowed.end()) {
    Fail(fmt::format("\"{}\" must be {}{}, found {}", key, allowed.size() > 1 ? "one of " : "",
                     Listed(allowed), ShownJson(value)));
  }
}

void ConfigReader::OnlyBool(const std::string& key, bool allowed) {
  if (BoolOr(key, allowed) != allowed) {
    Fail(fmt::format("\"{}\" must be {}, found {}: not supported", key, allowed, !allowed));
  }
}

void ConfigReader::Ignore(const std::vector<std::string>& keys) { read_.insert(keys.begin(), keys.end()); }

Status ConfigReader::Finish() {
  if (!fault_.ok()) return fault_;
  std::vector<std::string> unknown;
  for (const auto& [key, value] : object_.items()) {
    if (!read_.contains(key) && !value.is_null()) unknown.push_back(key);
  }
  if (unknown.empty()) return OkStatus();
  return Unimplemented("{}: unsupported field{} {}; running the model without {} could give wrong results",
                       file_, unknown.size() > 1 ? "s" : "", Listed(unknown),
                       unknown.size() > 1 ? "them" : "it");
}

}  // namespace moesaic::checkpoint
