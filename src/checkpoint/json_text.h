// Parses JSON from untrusted files.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/status.h"

namespace moesaic::checkpoint {

/// Parses `text`, which must be one JSON object. Rejects nesting deeper than 64 levels, because the library
/// copies, prints and destroys values recursively.
StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, const std::string& file);

/// Parses like ParseJsonObject and also rejects a key that occurs twice in the outermost object. `what` names
/// that object in the message.
StatusOr<nlohmann::json> ParseJsonObjectOnce(std::string_view text, const std::string& file,
                                             const std::string& what);

/// Returns whether brackets nest at most 64 levels deep.
bool IsShallowJson(std::string_view text);

/// Formats a value for a message; long values are truncated.
std::string ShownJson(const nlohmann::json& value);

}  // namespace moesaic::checkpoint
