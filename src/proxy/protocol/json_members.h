// Finds the members of a JSON object as byte ranges, and edits some of them without touching other bytes.
//
// A router must not reserialise a body: number text, key order, escapes and duplicate whitespace belong to
// the client. JsonMembers checks the whole text once, strictly (RFC 8259), and records only the top level.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace moesaic::proxy {

enum class JsonType { kNull, kBool, kNumber, kString, kArray, kObject };

/// Limits of a scan. Larger input is refused, so that a hostile body costs one linear pass and little memory.
struct JsonLimits {
  int max_depth = 128;
  size_t max_members = 4096;  ///< members of the top-level object, or elements of the top-level array
  /// The text is a value of a text that was scanned: strings are not checked again.
  bool checked = false;
};

/// One member of an object or element of an array. Offsets are bytes from the begin of the scanned text.
struct JsonMember {
  std::string key;       ///< unescaped; empty for elements of an array
  size_t key_begin = 0;  ///< the key's opening quote; of an element: value_begin
  size_t value_begin = 0, value_end = 0;
  JsonType type = JsonType::kNull;
};

/// The members of one object, or the elements of one array. It refers to the scanned text, which must outlive
/// it.
class JsonMembers {
 public:
  /// Scans a text that holds one object or one array. InvalidArgument names the byte and the fault.
  static StatusOr<JsonMembers> Scan(std::string_view text, const JsonLimits& limits = {});
  /// Scans the object or array at the begin of a text. `end` becomes the number of its bytes.
  static StatusOr<JsonMembers> ScanFirst(std::string_view text, const JsonLimits& limits, size_t* end);

  const std::vector<JsonMember>& all() const { return members_; }
  bool is_array() const { return is_array_; }
  /// Returns the last member of that name, which is the one that parsers of engines keep; null: there is
  /// none.
  const JsonMember* Find(std::string_view key) const;
  /// Returns the text of a value; empty if there is no such member.
  std::string_view Value(std::string_view key) const;
  std::string_view Text(const JsonMember& member) const {
    return text_.substr(member.value_begin, member.value_end - member.value_begin);
  }
  std::string_view text() const { return text_; }
  /// Values and objects at all depths below the scanned one.
  size_t num_values() const { return num_values_; }
  size_t num_objects() const { return num_objects_; }

  /// Returns whether a member exists and is not null, an empty list or an empty object.
  bool Given(std::string_view key) const;

  /// Values of members of simple types; nullopt if the member is absent or has another type.
  std::optional<std::string> String(std::string_view key) const;
  /// Text of a string as it is in the body, without its quotes.
  std::optional<std::string_view> QuotedString(std::string_view key) const;
  std::optional<int64_t> Integer(std::string_view key) const;
  std::optional<bool> Bool(std::string_view key) const;

 private:
  friend class JsonEdit;
  std::string_view text_;
  std::vector<JsonMember> members_;
  bool is_array_ = false;
  size_t close_ = 0;  // the closing bracket
  size_t num_values_ = 0, num_objects_ = 0;
};

/// Collects changes of an object's members and applies them in one pass. Bytes of other members are copied.
class JsonEdit {
 public:
  explicit JsonEdit(const JsonMembers& object) : object_(object) {}

  /// Replaces the value, or appends a member. `json` is the text of a value.
  void Set(std::string_view key, std::string json);
  /// Removes every member of that name.
  void Remove(std::string_view key);
  /// Text of a value after the changes so far; empty: there is no such member.
  std::string_view Current(std::string_view key) const;
  bool empty() const { return changes_.empty(); }
  std::string Apply() const;

 private:
  struct Change {
    std::string key;
    std::optional<std::string> json;  // nullopt: remove
  };
  const JsonMembers& object_;
  std::vector<Change> changes_;
};

/// Returns `text` as a JSON string. Bytes that are not ASCII are copied.
std::string JsonQuoted(std::string_view text);
/// Appends `text` as JsonQuoted writes it, without the quotes.
void AppendJsonEscaped(std::string_view text, std::string* json);
/// Returns the text of a valid JSON string without its quotes; nullopt if it has half of a surrogate pair.
std::optional<std::string> JsonUnescaped(std::string_view inside);
/// Returns the text of a JSON string with its quotes; nullopt if it is not one.
std::optional<std::string> JsonUnquoted(std::string_view json);

}  // namespace moesaic::proxy
