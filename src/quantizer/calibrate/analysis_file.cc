// Reads and writes quantize.analysis and the state of an unfinished walk.
#include <cstring>
#include <filesystem>
#include <initializer_list>

#include "checkpoint/safetensors.h"
#include "checkpoint/safetensors_writer.h"
#include "quantizer/calibrate/analysis.h"
#include "quantizer/calibrate/calibration_report.h"
#include "quantizer/io/checksum.h"
#include "tensor/static_scale.h"

namespace moesaic::quantizer {
namespace {

using nlohmann::ordered_json;

constexpr char kKey[] = "moesaic.analysis", kFindings[] = "findings", kScales[] = "input_scales",
               kMix[] = "mix", kState[] = "state";

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

AnalysisFinding FindingOf(const ordered_json& json) {
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

// Checksum of everything in a state file except its key. `texts` are its metadata.
std::string StateChecksum(const Folding& folding, const AnalysisState& state,
                          std::initializer_list<std::string> texts) {
  Xxh3 sum;
  for (const auto& [maker, scales] : folding.scales()) {
    sum.AddText(maker);
    sum.Add(scales.data(), scales.size() * sizeof(float));
  }
  for (const std::string& text : texts) sum.AddText(text);
  sum.AddText(fmt::format("{} {}", state.layers, state.hidden_xxh3));
  return sum.Hex();
}

}  // namespace

ordered_json Analysis::Json() const {
  ordered_json json = ordered_json::array();
  for (const AnalysisFinding& finding : findings) json.push_back(JsonOf(finding));
  return json;
}

std::string Analysis::Checksum() const {
  Xxh3 sum;
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

Status Analysis::Save(const std::string& path, const std::string& key, const AnalysisState& state) const {
  std::vector<checkpoint::TensorOutput> outputs;
  for (const auto& [maker, scales] : folding.scales()) {
    outputs.push_back(checkpoint::HeldTensor(maker, tensor::DType::kF32, {std::ssize(scales)},
                                             std::as_bytes(std::span<const float>(scales))));
  }
  ordered_json scales = ordered_json::object();
  for (const auto& [module, scale] : input_scales) scales[module] = scale;
  const std::string findings_text = Json().dump(), scales_text = scales.dump();
  std::vector<std::pair<std::string, std::string>> metadata = {
      {kKey, key}, {kFindings, findings_text}, {kScales, scales_text}};
  if (mix.has_value()) metadata.emplace_back(kMix, mix->Json().dump());
  if (state.layers > 0) {
    const ordered_json json = {{"layers", state.layers},
                               {"xxh3", state.hidden_xxh3},
                               {"decided_xxh3", StateChecksum(folding, state, {findings_text, scales_text})}};
    metadata.emplace_back(kState, json.dump());
  }
  return checkpoint::WriteSafetensors(path, outputs, metadata);
}

StatusOr<Analysis> Analysis::Load(const std::string& path, const std::string& key, bool sandwich,
                                  AnalysisState* state) {
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
  if (state != nullptr) {
    const ordered_json json = ordered_json::parse(text(kState), nullptr, false);
    if (!json.is_object()) return none();
    *state = {static_cast<int>(NumberIn(json, "layers")), TextIn(json, "xxh3")};
    const std::string xxh3 = StateChecksum(analysis.folding, *state, {text(kFindings), text(kScales)});
    if (TextIn(json, "decided_xxh3") != xxh3) return none();
  }
  const ordered_json findings = ordered_json::parse(text(kFindings), nullptr, false);
  const ordered_json scales = ordered_json::parse(text(kScales), nullptr, false);
  if (!findings.is_array() || !scales.is_object()) return none();
  for (const ordered_json& finding : findings) analysis.findings.push_back(FindingOf(finding));
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
