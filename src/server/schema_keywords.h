// Removes keywords of JSON Schema that grammars cannot enforce.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace moesaic::server {

/// Returns `schema` without "uniqueItems", which pydantic writes for every set. No grammar can enforce it, so
/// that answers may repeat items. Logs a warning with the request's field `param` where the keyword was true.
/// Removes a "format" that grammars do not know, such as "path", too: it is an annotation.
nlohmann::ordered_json EnforceableSchema(const nlohmann::ordered_json& schema, const std::string& param);

}  // namespace moesaic::server
