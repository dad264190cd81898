// Reads requests' JSON strictly: what is malformed, too deep or of a wrong type is refused by the field's
// name.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moesaic::server {

/// Keeps the order of keys, which chat templates show to the model.
using Json = nlohmann::ordered_json;

/// Parses a request's body: one JSON value of UTF-8 text, at most 64 levels deep and 1,024 members an object.
/// An integer of more than 64 bits becomes a binary value that holds its digits, which Dump writes again.
StatusOr<Json> ParseJson(std::string_view text);

/// Parses text that Dump wrote, however deep.
Json ParseDumped(std::string_view text);

/// As text, with bytes that are not UTF-8 replaced.
std::string Dump(const Json& json);
/// Likewise, with a space behind each comma and colon, as Python's json.dumps writes.
std::string DumpSpaced(const Json& json);

/// Reads members of one object, each at most once. A member that is absent or null leaves its target as it
/// is. The first fault is kept in `status`, and everything after it does nothing.
class Fields {
 public:
  /// `path` stands in front of the members' names in messages: "messages[0]"; empty for the body itself.
  Fields(const Json& object, std::string path);

  void Bool(const char* name, bool* value);
  void Int(const char* name, int64_t min, int64_t max, int64_t* value);
  void Int(const char* name, int min, int max, int* value);
  void Float(const char* name, double min, double max, float* value);
  void ShareAbove0(const char* name, float* value);  ///< in (0, 1]
  void String(const char* name, std::string* value);
  /// The member of that type, or null when it is absent.
  const Json* Object(const char* name);
  const Json* Array(const char* name);
  /// A member of any type; null is absent here too.
  const Json* Any(const char* name) const;
  bool Has(const char* name) const { return Any(name) != nullptr; }
  /// A string, or an array of at most `most` strings.
  void Strings(const char* name, size_t most, std::vector<std::string>* values);

  /// "messages[0].content" for "content".
  std::string Path(const char* name) const;
  void Fail(const char* name, const std::string& code, const std::string& message);
  void FailType(const char* name, const char* expected, const Json& found);
  void Merge(const Status& status);
  const Status& status() const { return status_; }
  bool ok() const { return status_.ok(); }

 private:
  const Json& object_;
  const std::string path_;
  Status status_;
};

/// "a string", "an integer", ...: what a value is, for messages.
const char* KindOf(const Json& json);
/// OpenAI's words for a value of a wrong type.
Status TypeError(const std::string& path, const char* expected, const Json& found);

}  // namespace moesaic::server
