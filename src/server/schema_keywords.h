// Keywords of JSON Schema that grammars cannot enforce.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace moesaic::server {

/// `schema` without "uniqueItems", which pydantic writes for every set and no grammar can enforce: answers
/// may repeat items. Logs a warning that names `param`, the request's field, where the keyword was true.
nlohmann::ordered_json EnforceableSchema(const nlohmann::ordered_json& schema, const std::string& param);

}  // namespace moesaic::server
