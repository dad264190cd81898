// JSON from files of unknown origin.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/status.h"

namespace moesaic::checkpoint {

/// Parses `text`, which must be one JSON object. Nesting beyond 64 levels is refused: the library copies,
/// prints and destroys values recursively.
StatusOr<nlohmann::json> ParseJsonObject(std::string_view text, const std::string& file);

/// The same, and refuses a key that stands twice in the outermost object (`what` names it in the message).
StatusOr<nlohmann::json> ParseJsonObjectOnce(std::string_view text, const std::string& file,
                                             const std::string& what);

/// Whether brackets nest at most 64 deep.
bool IsShallowJson(std::string_view text);

/// A value as a message shows it: long ones cut.
std::string ShownJson(const nlohmann::json& value);

}  // namespace moesaic::checkpoint
