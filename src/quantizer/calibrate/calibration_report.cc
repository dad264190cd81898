#include "quantizer/calibrate/calibration_report.h"

#include <algorithm>

#include "quantizer/format/weight_error.h"

namespace moesaic::quantizer {
namespace {

using nlohmann::ordered_json;

ordered_json JsonOf(const LinearFinding& finding) {
  return {{"name", finding.name},         {"layer", finding.layer},
          {"kind", KindOf(finding.name)}, {"method", finding.nearest ? "nearest" : "gptq"},
          {"tokens", finding.tokens},     {"shrinkage", finding.shrinkage},
          {"loss", finding.loss},         {"of_nearest", finding.of_nearest},
          {"damping", finding.damping},   {"xxh3", finding.xxh3}};
}

ordered_json JsonOf(const LayerRouting& routing) {
  return {{"layer", routing.layer}, {"tokens", routing.tokens}};
}

LinearFinding FindingOf(const ordered_json& json) {
  LinearFinding finding;
  finding.name = TextIn(json, "name");
  finding.layer = static_cast<int>(NumberIn(json, "layer"));
  finding.tokens = static_cast<int64_t>(NumberIn(json, "tokens"));
  finding.shrinkage = NumberIn(json, "shrinkage");
  finding.loss = NumberIn(json, "loss");
  finding.of_nearest = NumberIn(json, "of_nearest");
  finding.damping = NumberIn(json, "damping");
  finding.nearest = TextIn(json, "method") == "nearest";
  finding.xxh3 = TextIn(json, "xxh3");
  return finding;
}

LayerRouting RoutingOf(const ordered_json& json) {
  LayerRouting routing{static_cast<int>(NumberIn(json, "layer")), {}};
  const auto tokens = json.find("tokens");
  if (tokens == json.end()) return routing;
  for (const ordered_json& count : *tokens) {
    routing.tokens.push_back(count.is_number_integer() ? count.get<int64_t>() : 0);
  }
  return routing;
}

}  // namespace

bool LayerRouting::thin() const {
  const auto covered = std::ranges::count_if(tokens, [](int64_t count) { return count >= kCoveredTokens; });
  return 10 * covered < 9 * std::ssize(tokens);
}

double NumberIn(const ordered_json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_number() ? found->get<double>() : 0;
}

bool BoolIn(const ordered_json& json, const char* key, bool missing) {
  const auto found = json.find(key);
  return found != json.end() && found->is_boolean() ? found->get<bool>() : missing;
}

std::string TextIn(const ordered_json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_string() ? found->get<std::string>() : "";
}

ordered_json CalibrationReport::Json() const {
  ordered_json json = {{"linears", ordered_json::array()}, {"routing", ordered_json::array()}};
  for (const LinearFinding& finding : linears) json["linears"].push_back(JsonOf(finding));
  for (const LayerRouting& layer : routing) json["routing"].push_back(JsonOf(layer));
  return json;
}

CalibrationReport CalibrationReport::FromJson(const ordered_json& json) {
  CalibrationReport report;
  const auto linears = json.find("linears"), routing = json.find("routing");
  if (linears != json.end()) {
    for (const ordered_json& finding : *linears) report.linears.push_back(FindingOf(finding));
  }
  if (routing != json.end()) {
    for (const ordered_json& layer : *routing) report.routing.push_back(RoutingOf(layer));
  }
  return report;
}

}  // namespace moesaic::quantizer
