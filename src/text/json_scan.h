// Follows JSON text character by character, as far as finding calls in it needs. For this room only.
#pragma once

#include <string>
#include <string_view>

namespace moesaic::text {

/// Where one object ends that begins with '{'.
class JsonValueScan {
 public:
  enum class Step { kInside, kEnd, kBroken };
  /// Takes the next character. kEnd: it was the last one. kBroken: it is a '<' outside of a string, which is
  /// no JSON but may begin a mark; it was not taken.
  Step Take(char c);
  bool in_string() const { return in_string_; }
  int depth() const { return depth_; }

 private:
  int depth_ = 0;
  bool in_string_ = false, escaped_ = false;
};

/// Finds "name" and "arguments" (or "parameters") among the members of one object.
class CallObjectScan {
 public:
  JsonValueScan::Step Take(char c);
  const std::string& name() const { return name_; }
  bool named() const { return named_; }
  /// The text of the arguments that came since the last call of this. Arguments that are a string are given
  /// whole, unquoted, once they are complete.
  std::string TakeArguments();

 private:
  void EndKey();
  void EndValue();

  enum class Place { kBefore, kKey, kColon, kValue };
  JsonValueScan scan_;
  Place place_ = Place::kBefore;
  std::string key_, value_;
  std::string name_, arguments_;
  bool named_ = false;
  bool streams_ = false;  // the value at hand is the arguments' and no string
};

}  // namespace moesaic::text
