#include "quantizer/calibration_memory.h"

#include <algorithm>
#include <map>

#include "quantizer/gptq.h"
#include "quantizer/layer_walk.h"
#include "quantizer/runtime_matrix.h"
#include "quantizer/work_plan.h"

namespace moesaic::quantizer {

bool IsWalked(const ModelItem& item, const models::DecoderSpec& spec) {
  return item.linear && item.layer >= 0 && item.shape[0] != spec.vocab;
}

int64_t StateBytes(const models::DecoderSpec& spec, const OutputSettings& settings) {
  return settings.calibration.tokens * spec.hidden * static_cast<int64_t>(sizeof(float));
}

int64_t CalibrationBytes(const models::DecoderSpec& spec, const std::vector<ModelItem>& items,
                         const OutputSettings& settings, int threads) {
  const std::vector<Precision> roundings = settings.Roundings();
  struct Layer {
    int64_t packed = 0;  // linears outside of routed experts, as they run
    int64_t expert = 0;  // one of the routed ones
  };
  std::map<int, Layer> layers;
  // Of the linear that takes most, what experts share, and a linear as it is read: kept for all.
  int64_t rounding = 0, shared = 0, whole = 0;
  for (const ModelItem& item : items) {
    if (!IsWalked(item, spec)) continue;
    const auto n = static_cast<int>(item.shape[0]), k = static_cast<int>(item.shape[1]);
    Layer& layer = layers[item.layer];
    if (!item.roundable) {  // routers in f32; kv_b_proj in bf16, and a half of it turned as well
      layer.packed += item.elements() * 4;
      continue;
    }
    // An analysis has all of them in bf16, and so may --keep.
    const bool wide = settings.analyzed() || !settings.keep.empty();
    int64_t packed = wide ? item.elements() * (settings.mix.Has(tensor::DType::kF32) ? 4 : 2) : 0;
    for (const Precision& precision : roundings) {
      if (!wide) packed = std::max(packed, RuntimeMatrix::Bytes(precision.grid(), n, k));
    }
    if (!item.routed) layer.packed += packed;
    if (item.routed) layer.expert = std::max(layer.expert, 3 * packed);
    if (!settings.gptq) continue;
    const auto rows = static_cast<int>(std::min<int64_t>(GptqSlabRows(item), n));
    int64_t gptq = 0;
    for (const Precision& precision : roundings) {
      gptq = std::max(gptq, GptqBytes(precision.grid(), rows, k, threads));
    }
    const int64_t rounded = FactorBytes(k) + gptq + int64_t{rows} * k * 6;
    rounding = std::max(
        rounding, Hessian::Bytes(k) + Hessian::kAddBytes * k + std::max(FactoringBytes(k, threads), rounded));
    if (item.routed) shared = Hessian::Bytes(spec.hidden) + Hessian::Bytes(spec.moe.intermediate);
    // Measuring a mix reads a linear whole.
    if (settings.mix.wanted()) whole = std::max(whole, item.elements() * 4);
  }
  int64_t most = 0;
  for (const auto& [index, layer] : layers) most = std::max(most, layer.packed + layer.expert);
  most += rounding + shared + whole;
  const CalibrationId& id = settings.calibration;
  if (settings.analyze.wanted()) most += AnalysisBytes(spec);
  // A state that is read back takes no more than a layer's work.
  int64_t walk =
      most + CalibrationStream::Bytes(spec, id.tokens, id.longest) + WalkBytes(spec, id.tokens, id.longest);
  if (!settings.gptq && settings.mix.wanted()) walk = 0;  // what measuring takes: PlanMixPasses
  return walk + id.tokens * 8;                            // the ids themselves
}

}  // namespace moesaic::quantizer
