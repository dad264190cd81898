#include "quantizer/calibrate/folding.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace moesaic::quantizer {
namespace {

bool IsOneOf(std::string_view name, std::initializer_list<std::string_view> names) {
  for (const std::string_view one : names) {
    if (one == name) return true;
  }
  return false;
}

}  // namespace

std::string Folding::MakerOf(const std::string& module, bool sandwich) {
  constexpr std::string_view kLayers = "model.layers.";
  if (!module.starts_with(kLayers)) return "";
  const size_t layer_end = module.find('.', kLayers.size());
  const size_t dot = module.rfind('.');
  if (layer_end == std::string::npos || dot <= layer_end) return "";
  const std::string layer = module.substr(0, layer_end + 1), parent = module.substr(0, dot + 1);
  const std::string_view name = std::string_view(module).substr(dot + 1);
  if (parent == layer + "self_attn.") {
    if (name == "q_b_proj") return parent + "q_a_layernorm";
    const bool reads = IsOneOf(name, {"q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"});
    return reads ? layer + "input_layernorm" : "";
  }
  if (!parent.starts_with(layer + "mlp.")) return "";
  if (name == "down_proj") return parent + "up_proj";
  const bool router = parent == layer + "mlp." && name == "gate";
  if (!router && !IsOneOf(name, {"gate_proj", "up_proj"})) return "";
  return layer + (sandwich ? "pre_mlp_layernorm" : "post_attention_layernorm");
}

void Folding::Add(const std::string& maker, std::vector<float> scales) { scales_[maker] = std::move(scales); }

const std::vector<float>* Folding::Find(const std::string& maker) const {
  if (maker.empty() || scales_.empty()) return nullptr;
  const auto found = scales_.find(maker);
  return found == scales_.end() ? nullptr : &found->second;
}

const std::vector<float>* Folding::OutputsOf(const std::string& item) const {
  for (const std::string_view ending : {".weight", ".bias"}) {  // a norm's tensor, a linear's bias
    if (item.ends_with(ending)) return Find(item.substr(0, item.size() - ending.size()));
  }
  return Find(item);
}

Status Folding::Check(std::span<const ModelItem> items, const std::string& file) const {
  for (const auto& [maker, scales] : scales_) {
    const auto wrong = std::ranges::find_if(scales, [](float s) { return !(s > 0) || !std::isfinite(s); });
    if (wrong != scales.end()) {
      return DataLoss("{}: {} must have positive and finite scales, found {}", file, maker, *wrong);
    }
  }
  const auto fits = [&](const std::vector<float>* scales, const std::string& item, int64_t size) {
    if (scales == nullptr || std::ssize(*scales) == size) return OkStatus();
    return DataLoss("{}: {} must be scaled by {} numbers, found {}", file, item, size, scales->size());
  };
  for (const ModelItem& item : items) {
    if (item.shape.empty()) continue;
    if (item.shape.size() == 2) RETURN_IF_ERROR(fits(InputsOf(item.name), item.name, item.shape[1]));
    RETURN_IF_ERROR(fits(OutputsOf(item.name), item.name, item.shape[0]));
  }
  return OkStatus();
}

void Folding::ApplyToRow(const std::string& item, int64_t row, int64_t columns, float* values) const {
  if (const std::vector<float>* inputs = InputsOf(item)) {
    MOESAIC_CHECK_EQ(std::ssize(*inputs), columns);
    for (int64_t j = 0; j < columns; ++j) values[j] *= (*inputs)[j];
  }
  const std::vector<float>* outputs = OutputsOf(item);
  if (outputs == nullptr) return;
  const bool vector = item.ends_with(".weight") || item.ends_with(".bias");
  MOESAIC_CHECK_GE(std::ssize(*outputs), vector ? columns : row + 1);
  for (int64_t j = 0; j < columns; ++j) values[j] /= (*outputs)[vector ? j : row];
}

void Folding::Apply(const kernels::ExecContext& ctx, const std::string& item, int64_t first, int64_t count,
                    int64_t columns, float* rows) const {
  if (!Touches(item)) return;
  ctx.pool->Run(count, [&](int64_t r, int) { ApplyToRow(item, first + r, columns, rows + r * columns); });
}

}  // namespace moesaic::quantizer
