// Describes the API for GET /openapi.json: OpenAPI 3.1.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "server/json_fields.h"
#include "server/served_model.h"

namespace moesaic::server {

/// Returns the description of all `routes`, which are the method and path of every endpoint. A path may have
/// segments {NAME}; a path that ends in '/' is followed by a model's name. A route that openapi.cc does not
/// describe aborts the program as a bug.
Json OpenApi(const ServedModel& model, const std::string& version,
             const std::vector<std::pair<std::string, std::string>>& routes);

}  // namespace moesaic::server
