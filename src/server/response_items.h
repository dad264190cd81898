// Converts items of the Responses API to the form in which they are stored, and lists them in pages.
#pragma once

#include <string>

#include "server/json_fields.h"
#include "server/stored_items.h"

namespace moesaic::server {

/// Checks `items`, an array in the form of a request's "input", and returns them with a status and a new id
/// each. A client's own ids are replaced: an item that it sends again would have the id of another one, and
/// pages after that id would never end. `path` names the array.
StatusOr<Json> KeptItems(const Json& items, const std::string& path);

/// Returns the items of a request's "input", which is a string or an array.
StatusOr<Json> InputItems(const Json& input);

/// Returns the JSON text of one page of `items` with "object", "data", "first_id", "last_id" and "has_more".
/// Reads "limit", "order" and "after" from `query`. Parses no item.
StatusOr<std::string> ItemPage(const StoredItems& items, const std::string& query);

}  // namespace moesaic::server
