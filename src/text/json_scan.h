// Incremental JSON scanners for tool calls; they parse character by character. Private to this room.
#pragma once

#include <string>
#include <string_view>

namespace moesaic::text {

/// Finds the end of one object that begins with '{'.
class JsonValueScan {
 public:
  enum class Step { kInside, kEnd, kBroken };
  /// Consumes the next character. kEnd: it was the last one of the object. kBroken: it is a '<' outside of a
  /// string, which is invalid JSON but may begin a marker; it was not consumed.
  Step Take(char c);
  bool in_string() const { return in_string_; }
  int depth() const { return depth_; }

 private:
  int depth_ = 0;
  bool in_string_ = false, escaped_ = false;
};

/// Extracts "name" and "arguments" (or "parameters") from the members of one object.
class CallObjectScan {
 public:
  JsonValueScan::Step Take(char c);
  const std::string& name() const { return name_; }
  bool named() const { return named_; }
  /// Returns true once "arguments" or "parameters" has begun.
  bool argued() const { return argued_; }
  /// Returns the text of the arguments received since the last call. String-valued arguments are returned
  /// whole and unquoted once they are complete.
  std::string TakeArguments();

 private:
  void EndKey();
  void EndValue();

  enum class Position { kBefore, kKey, kColon, kValue };
  JsonValueScan scan_;
  Position position_ = Position::kBefore;
  std::string key_, value_;
  std::string name_, arguments_;
  bool named_ = false, argued_ = false;
  bool streams_ = false;  // the current value is the arguments' and not a string
};

}  // namespace moesaic::text
