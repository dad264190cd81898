// Reads the query parameters of a request.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace moesaic::server {

/// Returns the first value of `name` in `query`, percent-decoded, or "".
std::string QueryValue(std::string_view query, std::string_view name);

/// Returns an integer in [min, max], or `otherwise` when `name` is absent. InvalidArgument names the
/// parameter.
StatusOr<int> QueryInt(std::string_view query, const char* name, int min, int max, int otherwise);

/// Returns true for "true", and false for "false" and when `name` is absent. InvalidArgument for other
/// values.
StatusOr<bool> QueryBool(std::string_view query, const char* name);

}  // namespace moesaic::server
