// Converts the settings of a run to and from JSON, for its journal and output files.
#include <algorithm>
#include <iterator>
#include <limits>

#include "base/checksum.h"
#include "checkpoint/json_text.h"
#include "quantizer/format/output_plan.h"

namespace moesaic::quantizer {

using nlohmann::ordered_json;
using tensor::DType;

CalibrationId CalibrationId::Of(const std::vector<std::vector<int32_t>>& sequences) {
  base::Xxh3 sum;
  CalibrationId id;
  for (const std::vector<int32_t>& ids : sequences) {
    const auto count = static_cast<int64_t>(ids.size());
    sum.Add(&count, sizeof(count));
    sum.Add(ids.data(), ids.size() * sizeof(int32_t));
    id.tokens += count;
    id.longest = std::max(id.longest, count);
    ++id.sequences;
  }
  id.xxh3 = sum.Hex();
  return id;
}

float OutputSettings::InputScale(const std::string& module) const {
  if (analysis == nullptr) return 0;
  const auto found = analysis->input_scales.find(module);
  return found == analysis->input_scales.end() ? 0 : found->second;
}

std::vector<Precision> OutputSettings::Roundings() const {
  if (!mix.wanted()) return {{.scheme = scheme, .group_size = group_size}};
  std::vector<Precision> roundings;
  std::ranges::copy_if(mix.options, std::back_inserter(roundings),
                       [](const Precision& p) { return !p.kept(); });
  return roundings;
}

ordered_json OutputSettings::Json() const {
  ordered_json json;
  if (mix.wanted()) {
    json["mix"] = mix.Json();
  } else {
    json["scheme"] = SchemeName(scheme);
  }
  json["method"] = gptq ? "gptq" : search ? "mse" : "rtn";
  if (!mix.wanted() && HasGroupSize(scheme)) json["group_size"] = group_size;
  for (const KeepRule& rule : keep) json["keep"].push_back({tensor::DTypeName(rule.dtype), rule.pattern});
  json["shard_bytes"] = shard_bytes;
  if (analyze.smoothing) json["smoothing"] = true;
  if (analyze.static_activations) json["static_tolerance"] = analyze.static_tolerance;
  if (!analysis_xxh3.empty()) json["analysis"] = analysis_xxh3;
  if (!calibration.xxh3.empty()) {
    json["calibration"] = {{"xxh3", calibration.xxh3},
                           {"tokens", calibration.tokens},
                           {"sequences", calibration.sequences},
                           {"longest", calibration.longest}};
  }
  return json;
}

StatusOr<OutputSettings> OutputSettings::FromJson(const std::string& text, const std::string& file) {
  const auto refuse = [&] {
    return DataLoss("{}: \"{}\" must have a value that moesaic quantize wrote, found {}", file, kSettingsKey,
                    text);
  };
  ASSIGN_OR_RETURN(const nlohmann::json json, checkpoint::ParseJsonObject(text, file));
  const auto scheme = json.find("scheme"), method = json.find("method"), shards = json.find("shard_bytes"),
             mix = json.find("mix");
  const bool has_scheme = scheme != json.end() && scheme->is_string();
  if (has_scheme == (mix != json.end()) || method == json.end() || !method->is_string() ||
      shards == json.end() || !shards->is_number_integer()) {
    return refuse();
  }
  OutputSettings settings;
  if (has_scheme) {
    ASSIGN_OR_RETURN(settings.scheme, ParseScheme(scheme->get<std::string>()));
  } else {
    StatusOr<MixSettings> parsed = MixSettings::FromJson(*mix);
    if (!parsed.ok()) return Annotate(parsed.status(), file);
    settings.mix = *std::move(parsed);
  }
  settings.gptq = *method == "gptq";
  settings.search = settings.gptq || *method == "mse";
  if (const auto smoothing = json.find("smoothing"); smoothing != json.end()) {
    if (!smoothing->is_boolean()) return refuse();
    settings.analyze.smoothing = smoothing->get<bool>();
  }
  if (const auto analysis = json.find("analysis"); analysis != json.end()) {
    if (!analysis->is_string()) return refuse();
    settings.analysis_xxh3 = analysis->get<std::string>();
  }
  if (const auto tolerance = json.find("static_tolerance"); tolerance != json.end()) {
    if (!tolerance->is_number()) return refuse();
    settings.analyze.static_activations = true;
    settings.analyze.static_tolerance = tolerance->get<double>();
  }
  if (const auto calibration = json.find("calibration"); calibration != json.end()) {
    const auto number = [&](const char* key) {
      const auto found = calibration->find(key);
      return found != calibration->end() && found->is_number_integer() ? found->get<int64_t>() : -1;
    };
    const auto xxh3 = calibration->is_object() ? calibration->find("xxh3") : calibration->end();
    if (xxh3 == calibration->end() || !xxh3->is_string()) return refuse();
    settings.calibration = {xxh3->get<std::string>(), number("tokens"), number("sequences"),
                            number("longest")};
    if (settings.calibration.tokens < 1 || settings.calibration.longest < 1) return refuse();
  }
  settings.shard_bytes = shards->get<int64_t>();
  if (settings.shard_bytes < 1) return refuse();
  if (const auto group = json.find("group_size"); group != json.end()) {
    if (!group->is_number_integer() || *group < 0 || *group > std::numeric_limits<int>::max())
      return refuse();
    settings.group_size = group->get<int>();
  }
  for (const nlohmann::json& rule : json.value("keep", nlohmann::json::array())) {
    if (!rule.is_array() || rule.size() != 2 || !rule[0].is_string() || !rule[1].is_string()) return refuse();
    settings.keep.push_back({rule[0] == "F32" ? DType::kF32 : DType::kBF16, rule[1].get<std::string>()});
  }
  return settings;
}

}  // namespace moesaic::quantizer
