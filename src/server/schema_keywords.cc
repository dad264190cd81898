#include "server/schema_keywords.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "server/json_fields.h"

namespace moesaic::server {
namespace {

constexpr const char* kUnique = "uniqueItems";
// Formats of strings that grammars can enforce.
constexpr std::array<std::string_view, 10> kFormats = {"date", "date-time", "duration", "email", "hostname",
                                                       "ipv4", "ipv6",      "time",     "uri",   "uuid"};
// Names of members whose value is data and no schema.
constexpr std::array<std::string_view, 4> kData = {"const", "default", "enum", "examples"};
// Names of members that map names to schemas.
constexpr std::array<std::string_view, 5> kMaps = {"$defs", "definitions", "dependentSchemas",
                                                   "patternProperties", "properties"};

bool IsIn(const auto& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

// Returns true if it removed a "uniqueItems" that was true.
bool Remove(Json* schema) {
  bool demanded = false;
  if (schema->is_array()) {
    for (Json& each : *schema) demanded = Remove(&each) || demanded;
  }
  if (!schema->is_object()) return demanded;
  if (const auto found = schema->find(kUnique); found != schema->end() && found->is_boolean()) {
    demanded = found->get<bool>();
    schema->erase(found);
  }
  if (const auto found = schema->find("format");
      found != schema->end() && found->is_string() && !IsIn(kFormats, found->get_ref<const std::string&>())) {
    schema->erase(found);
  }
  for (auto& [name, value] : schema->items()) {
    if (IsIn(kData, name)) continue;
    if (IsIn(kMaps, name) && value.is_object()) {
      for (Json& each : value) demanded = Remove(&each) || demanded;
    } else {
      demanded = Remove(&value) || demanded;
    }
  }
  return demanded;
}

}  // namespace

Json EnforceableSchema(const Json& schema, const std::string& param) {
  Json kept = schema;
  if (Remove(&kept)) {
    spdlog::warn("'{}': \"uniqueItems\" is ignored, since a grammar cannot enforce it", param);
  }
  return kept;
}

}  // namespace moesaic::server
