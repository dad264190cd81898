// Reads the JSON of requests strictly. Errors name the field that is malformed, nested too deeply or of a
// wrong type.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moesaic::server {

/// JSON that keeps the order of keys, since chat templates show it to the model.
using Json = nlohmann::ordered_json;

/// Parses a request's body: one JSON value of UTF-8 text with at most 64 levels, and at most 1,024 members in
/// an object. An integer of more than 64 bits becomes a binary value with its digits, which Dump writes
/// unchanged.
StatusOr<Json> ParseJson(std::string_view text);

/// Parses text that Dump wrote, without a limit on its levels.
Json ParseDumped(std::string_view text);

/// Prints JSON. Replaces bytes that are not UTF-8.
std::string Dump(const Json& json);
/// Prints JSON with a space after each comma and colon, as Python's json.dumps does.
std::string DumpSpaced(const Json& json);

/// Reads members of one object. A member that is absent or null leaves its target unchanged. `status` has the
/// first error, and all calls after it do nothing.
class Fields {
 public:
  /// `path` precedes the members' names in messages, e.g. "messages[0]". It is empty for the body itself.
  Fields(const Json& object, std::string path);

  void Bool(const char* name, bool* value);
  void Int(const char* name, int64_t min, int64_t max, int64_t* value);
  void Int(const char* name, int min, int max, int* value);
  void Float(const char* name, double min, double max, float* value);
  void ShareAbove0(const char* name, float* value);  ///< in (0, 1]
  void String(const char* name, std::string* value);
  /// Returns the member of that type, or null when it is absent.
  const Json* Object(const char* name);
  const Json* Array(const char* name);
  /// Returns a member of any type, or null when it is absent or null.
  const Json* Any(const char* name) const;
  bool Has(const char* name) const { return Any(name) != nullptr; }
  /// Reads a string, or an array of at most `most` strings.
  void Strings(const char* name, size_t most, std::vector<std::string>* values);

  /// Returns "messages[0].content" for "content".
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

/// Returns the kind of a value for messages: "a string", "an integer", ...
const char* KindOf(const Json& json);
/// Returns an error for a value of a wrong type, in OpenAI's words.
Status TypeError(const std::string& path, const char* expected, const Json& found);

}  // namespace moesaic::server
