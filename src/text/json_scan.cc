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
    if (position_ == Position::kValue) EndValue();
    return step;
  }
  const bool top = depth == 1 && !was_string;  // `c` is between the object's own members
  switch (position_) {
    case Position::kBefore:
      if (top && c == '"') {
        position_ = Position::kKey;
        key_ = c;
      }
      break;
    case Position::kKey:
      key_ += c;
      if (was_string && !scan_.in_string()) EndKey();
      break;
    case Position::kColon:
      if (top && c == ':') {
        position_ = Position::kValue;
        value_.clear();
        streams_ = false;
      }
      break;
    case Position::kValue:
      if (top && (c == ',' || c == '}')) {
        EndValue();
        position_ = Position::kBefore;
        break;
      }
      if (value_.empty() && IsSpace(c)) break;
      if (value_.empty()) {
        const bool arguments = key_ == "arguments" || key_ == "parameters";
        argued_ |= arguments;
        streams_ = arguments && c != '"';
      }
      value_ += c;
      if (streams_) arguments_ += c;
      break;
  }
  return step;
}

void CallObjectScan::EndKey() {
  key_ = Unquoted(key_);
  position_ = Position::kColon;
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
