// A JSON array as text, whose items are read without parsing the others.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "server/json_fields.h"

namespace moesaic::server {

class StoredItems {
 public:
  StoredItems() = default;
  explicit StoredItems(const Json& array);

  void Append(const StoredItems& more);
  /// Number of bytes that Append(more) adds to the text.
  size_t GrowthBy(const StoredItems& more) const;

  size_t size() const { return ends_.size(); }
  std::string_view operator[](size_t index) const;
  /// Returns the first item whose "id" is `id`, or "". An item has an id if this is its first member, as in
  /// all items of the Responses API that the server writes.
  std::string_view Find(std::string_view id) const;
  const std::string& json() const { return json_; }  ///< the array

 private:
  void Add(std::string_view item);

  std::string json_ = "[]";
  std::vector<size_t> ends_;  // of the items in json_
};

/// Returns the id of an item, or "" for an item without one.
std::string_view IdOf(std::string_view item);

}  // namespace moesaic::server
