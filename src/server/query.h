// Parameters behind the '?' of a request.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace moesaic::server {

/// The first value of `name` in `query`, percent-decoded; empty when there is none.
std::string QueryValue(std::string_view query, std::string_view name);

/// An integer in [min, max], or `otherwise` when `name` is absent. InvalidArgument that names it.
StatusOr<int> QueryInt(std::string_view query, const char* name, int min, int max, int otherwise);

/// True for "true", false for "false" and when `name` is absent. InvalidArgument for other values.
StatusOr<bool> QueryBool(std::string_view query, const char* name);

}  // namespace moesaic::server
