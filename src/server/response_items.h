// Items of the Responses API as a conversation keeps them.
#pragma once

#include <string>

#include "server/json_fields.h"

namespace moesaic::server {

/// `items`, an array in the form of a request's "input", each checked and with an id and a status. `path`
/// names the array.
StatusOr<Json> KeptItems(const Json& items, const std::string& path);

/// The items of a request's "input", which is a string or an array.
StatusOr<Json> InputItems(const Json& input);

/// One page of `items`: "object", "data", "first_id", "last_id" and "has_more". The query says "limit",
/// "order" and "after".
StatusOr<Json> ItemPage(const Json& items, const std::string& query);

}  // namespace moesaic::server
