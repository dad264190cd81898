// Reads and writes quantize.analysis, and the decisions of an unfinished walk in the same form.
#include <cstring>
#include <filesystem>

#include "base/checksum.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/safetensors_writer.h"
#include "quantizer/calibrate/analysis.h"
#include "quantizer/calibrate/calibration_report.h"
#include "tensor/static_scale.h"

namespace moesaic::quantizer {
namespace {

using nlohmann::ordered_json;

constexpr char kKey[] = "moesaic.analysis", kFindings[] = "findings", kScales[] = "input_scales",
               kMix[] = "mix";

ordered_json JsonOf(const AnalysisFinding& finding) {
  return {{"name", finding.name},
          {"layer", finding.layer},
          {"tokens", finding.tokens},
          {"stand_ins", finding.stand_ins},
          {"alpha", finding.alpha},
          {"loss_before", finding.loss_before},
          {"loss_after", finding.loss_after},
          {"scale", finding.scale},
          {"static_loss", finding.static_loss},
          {"dynamic_loss", finding.dynamic_loss}};
}

AnalysisFinding AnalysisFindingOf(const ordered_json& json) {
  AnalysisFinding finding;
  finding.name = TextIn(json, "name");
  finding.stand_ins = BoolIn(json, "stand_ins", false);
  finding.layer = static_cast<int>(NumberIn(json, "layer"));
  finding.tokens = static_cast<int64_t>(NumberIn(json, "tokens"));
  finding.alpha = static_cast<float>(NumberIn(json, "alpha"));
  finding.loss_before = NumberIn(json, "loss_before");
  finding.loss_after = NumberIn(json, "loss_after");
  finding.scale = static_cast<float>(NumberIn(json, "scale"));
  finding.static_loss = NumberIn(json, "static_loss");
  finding.dynamic_loss = NumberIn(json, "dynamic_loss");
  return finding;
}

}  // namespace

ordered_json Analysis::Json() const {
  ordered_json json = ordered_json::array();
  for (const AnalysisFinding& finding : findings) json.push_back(JsonOf(finding));
  return json;
}

std::string Analysis::Checksum() const {
  base::Xxh3 sum;
  const auto add = [&](const std::string& name, std::span<const float> values) {
    sum.AddText(name);
    sum.Add(values.data(), values.size_bytes());
  };
  for (const auto& [maker, scales] : folding.scales()) add(maker, scales);
  for (const auto& [module, scale] : input_scales) add(module, {&scale, 1});
  if (mix.has_value()) {
    for (const auto& [unit, precision] : mix->Choice()) {
      sum.AddText(unit);
      sum.AddText(precision.Name());
    }
  }
  return sum.Hex();
}

Status Analysis::Save(const std::string& path, const std::string& key) const {
  std::vector<checkpoint::TensorOutput> outputs;
  for (const auto& [maker, scales] : folding.scales()) {
    outputs.push_back(checkpoint::HeldTensor(maker, tensor::DType::kF32, {std::ssize(scales)},
                                             std::as_bytes(std::span<const float>(scales))));
  }
  ordered_json scales = ordered_json::object();
  for (const auto& [module, scale] : input_scales) scales[module] = scale;
  std::vector<std::pair<std::string, std::string>> metadata = {
      {kKey, key}, {kFindings, Json().dump()}, {kScales, scales.dump()}};
  if (mix.has_value()) metadata.emplace_back(kMix, mix->Json().dump());
  return checkpoint::WriteSafetensors(path, outputs, metadata);
}

StatusOr<Analysis> Analysis::Load(const std::string& path, const std::string& key, bool sandwich) {
  const auto none = [&] { return NotFound("{}: does not exist or belongs to another analysis", path); };
  if (!std::filesystem::exists(path)) return none();
  ASSIGN_OR_RETURN(const auto mapped, runtime::MappedFile::Open(path));
  ASSIGN_OR_RETURN(const auto file, checkpoint::ParseSafetensors(mapped->bytes(), path));
  const auto text = [&](const char* name) {
    const auto found = file.metadata.find(name);
    return found == file.metadata.end() ? std::string() : found->second;
  };
  if (!key.empty() && text(kKey) != key) return none();
  Analysis analysis;
  analysis.folding = Folding(sandwich);
  for (const checkpoint::TensorEntry& entry : file.tensors) {
    if (entry.dtype != tensor::DType::kF32) return none();
    std::vector<float> values(entry.bytes.size() / sizeof(float));
    std::memcpy(values.data(), entry.bytes.data(), entry.bytes.size());
    analysis.folding.Add(entry.name, std::move(values));
  }
  const ordered_json findings = ordered_json::parse(text(kFindings), nullptr, false);
  const ordered_json scales = ordered_json::parse(text(kScales), nullptr, false);
  if (!findings.is_array() || !scales.is_object()) return none();
  for (const ordered_json& finding : findings) analysis.findings.push_back(AnalysisFindingOf(finding));
  for (const auto& [module, scale] : scales.items()) {
    if (!scale.is_number()) return none();
    const auto value = scale.get<float>();
    if (!tensor::StaticScale::HasInverse(value)) return none();
    analysis.input_scales[module] = value;
  }
  if (file.metadata.contains(kMix)) {
    const ordered_json mix = ordered_json::parse(text(kMix), nullptr, false);
    if (!mix.is_object()) return none();
    ASSIGN_OR_RETURN(analysis.mix, Mix::FromJson(mix));
  }
  return analysis;
}

}  // namespace moesaic::quantizer
