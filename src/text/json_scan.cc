#include "text/json_scan.h"

#include <nlohmann/json.hpp>
#include <utility>

namespace moesaic::text {
namespace {

bool IsSpace(char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

// Returns the value of a JSON string; empty if it is invalid.
std::string Unquoted(const std::string& quoted) {
  const auto json = nlohmann::json::parse(quoted, nullptr, /*allow_exceptions=*/false);
  return json.is_string() ? json.get<std::string>() : "";
}

}  // namespace

JsonValueScan::Step JsonValueScan::Take(char c) {
  if (in_string_) {
    if (escaped_) {
      escaped_ = false;
    } else if (c == '\\') {
      escaped_ = true;
    } else if (c == '"') {
      in_string_ = false;
    }
    return Step::kInside;
  }
  switch (c) {
    case '<':
      return Step::kBroken;
    case '"':
      in_string_ = true;
      return Step::kInside;
    case '{':
    case '[':
      ++depth_;
      return Step::kInside;
    case '}':
    case ']':
      return --depth_ <= 0 ? Step::kEnd : Step::kInside;
    default:
      return Step::kInside;
  }
}

JsonValueScan::Step CallObjectScan::Take(char c) {
  const int depth = scan_.depth();
  const bool was_string = scan_.in_string();
  const JsonValueScan::Step step = scan_.Take(c);
  if (step == JsonValueScan::Step::kBroken) {
    if (place_ == Place::kValue) EndValue();
    return step;
  }
  const bool top = depth == 1 && !was_string;  // `c` is between the object's own members
  switch (place_) {
    case Place::kBefore:
      if (top && c == '"') {
        place_ = Place::kKey;
        key_ = c;
      }
      break;
    case Place::kKey:
      key_ += c;
      if (was_string && !scan_.in_string()) EndKey();
      break;
    case Place::kColon:
      if (top && c == ':') {
        place_ = Place::kValue;
        value_.clear();
        streams_ = false;
      }
      break;
    case Place::kValue:
      if (top && (c == ',' || c == '}')) {
        EndValue();
        place_ = Place::kBefore;
        break;
      }
      if (value_.empty() && IsSpace(c)) break;
      if (value_.empty()) streams_ = (key_ == "arguments" || key_ == "parameters") && c != '"';
      value_ += c;
      if (streams_) arguments_ += c;
      break;
  }
  return step;
}

void CallObjectScan::EndKey() {
  key_ = Unquoted(key_);
  place_ = Place::kColon;
}

void CallObjectScan::EndValue() {
  if (key_ == "name" && !named_) {
    name_ = Unquoted(value_);
    named_ = !name_.empty();
  } else if (!streams_ && (key_ == "arguments" || key_ == "parameters")) {
    arguments_ += Unquoted(value_);
  }
}

std::string CallObjectScan::TakeArguments() {
  // White space after a complete value belongs to the enclosing object.
  size_t end = arguments_.size();
  if (!scan_.in_string() && scan_.depth() <= 1) {
    while (end > 0 && IsSpace(arguments_[end - 1])) --end;
  }
  std::string taken = arguments_.substr(0, end);
  arguments_.erase(0, end);
  return taken;
}

}  // namespace moesaic::text
