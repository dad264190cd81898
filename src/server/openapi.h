// The description of the API that GET /openapi.json gives: OpenAPI 3.1.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "server/json_fields.h"
#include "server/served_model.h"

namespace moesaic::server {

/// `routes`: method and path of every endpoint, of which one that ends in '/' takes a name behind it. Each
/// must be described here, and nothing else is.
Json OpenApi(const ServedModel& model, const std::string& version,
             const std::vector<std::pair<std::string, std::string>>& routes);

}  // namespace moesaic::server
