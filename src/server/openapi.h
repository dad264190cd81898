// Describes the API for GET /openapi.json: OpenAPI 3.1.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "server/json_fields.h"
#include "server/served_model.h"

namespace moesaic::server {

/// `routes`: method and path of every endpoint. A path may have segments {NAME}, and one that ends in '/'
/// takes a model's name after it. Describes each route; a route without a description is a failed check.
Json OpenApi(const ServedModel& model, const std::string& version,
             const std::vector<std::pair<std::string, std::string>>& routes);

}  // namespace moesaic::server
