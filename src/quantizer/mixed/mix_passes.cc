#include "quantizer/mixed/mix_passes.h"

#include <algorithm>
#include <set>

#include "quantizer/calibrate/calibration_stream.h"
#include "quantizer/calibrate/layer_walk.h"
#include "quantizer/format/runtime_matrix.h"
#include "quantizer/mixed/variant_losses.h"

namespace moesaic::quantizer {
namespace {

using tensor::DType;

// Number of variants of a unit with all options, and of a router.
int VariantsOfUnit(const MixSettings& mix) {
  const DType exact = MixExactType(mix);
  int variants = HalfAlone(mix) ? 1 : 0;
  for (const Precision& option : mix.options) variants += NeedsVariant(option, exact) ? 1 : 0;
  return variants;
}
int VariantsOfRouter(const MixSettings& mix) {
  return static_cast<int>(std::ranges::count(mix.options, false, &Precision::kept));
}

// Memory of a layer during a measurement: packed linears outside of experts and one expert's three, for the
// first variant and for all variants that begin there.
struct LayerLoad {
  int64_t variants = 0;  // variants that begin in the layer
  int64_t dense = 0, expert = 0;
  int64_t dense_of_all = 0, expert_of_all = 0;
  std::set<std::string> units;

  int64_t bytes(bool all) const { return all ? dense_of_all + 3 * expert_of_all : dense + 3 * expert; }
};

struct MixLoad {
  std::vector<LayerLoad> layers;
  int64_t slab = 0;  // slab of a linear that is being rounded

  // Returns the maximum memory of `pass`, whose other fields are set.
  int64_t Bytes(const models::DecoderSpec& spec, const OutputSettings& settings, const MixPass& pass) const {
    const int64_t sample = MixSampleTokens(settings), tokens = pass.variants * sample;
    int64_t matrices = 0;
    for (int layer = pass.first; layer < spec.layers; ++layer) {
      matrices = std::max(matrices, layers[layer].bytes(layer < pass.end));
    }
    // Routes: an id and a weight for each of top_k, and the spare capacity of vectors.
    const int64_t routes = tokens * spec.moe.top_k * 16;
    // The first variant is kept between two passes.
    const bool keeps = pass.first > 0 || pass.end < spec.layers;
    const int64_t kept = keeps ? sample * spec.hidden * static_cast<int64_t>(sizeof(float)) : 0;
    return CalibrationStream::Bytes(spec, tokens, kMixSampleLength) +
           WalkBytes(spec, tokens, kMixSampleLength) + routes + kept +
           std::max(matrices + slab, VariantLossBytes(spec, MixExactType(settings.mix), tokens));
  }
};

MixLoad LoadOf(const models::DecoderSpec& spec, const std::vector<ModelItem>& items,
               const OutputSettings& settings) {
  const MixSettings& mix = settings.mix;
  const int64_t exact = MixExactType(mix) == DType::kF32 ? 4 : 2;
  MixLoad load{.layers = std::vector<LayerLoad>(static_cast<size_t>(spec.layers))};
  int64_t widest = spec.hidden;
  for (const ModelItem& item : items) {
    if (!item.linear || item.layer < 0 || item.layer >= spec.layers) continue;
    LayerLoad& layer = load.layers[item.layer];
    if (!item.roundable) {
      // See CalibrationBytes. A router additionally has a matrix for each of its variants, and one while it
      // is made.
      const bool router = item.name.ends_with(".mlp.gate");
      layer.dense += item.elements() * 4;
      layer.dense_of_all += item.elements() * 4 * (router ? VariantsOfRouter(mix) + 2 : 1);
      if (router) layer.variants += VariantsOfRouter(mix);
      continue;
    }
    if (layer.units.insert(PrecisionGroupOf(item.name)).second) layer.variants += VariantsOfUnit(mix);
    const int64_t first = item.elements() * exact;
    int64_t all = first + (HalfAlone(mix) ? item.elements() * 2 : 0);
    for (const Precision& option : mix.options) {
      all += option.kept() ? item.elements() * (option.dtype == DType::kBF16 ? 2 : 4)
                           : RuntimeMatrix::Bytes(option.grid(), static_cast<int>(item.shape[0]),
                                                  static_cast<int>(item.shape[1]));
    }
    if (item.routed) {
      layer.expert = std::max(layer.expert, first);
      layer.expert_of_all = std::max(layer.expert_of_all, all);
    } else {
      layer.dense += first;
      layer.dense_of_all += all;
    }
    widest = std::max(widest, item.shape[1]);
  }
  load.slab = std::max(kMixSlabValues, kRowStep * widest) * 8;
  return load;
}

}  // namespace

DType MixExactType(const MixSettings& mix) {
  return mix.Has(DType::kF16) || mix.Has(DType::kF32) ? DType::kF32 : DType::kBF16;
}

bool NeedsVariant(const Precision& precision, DType exact) {
  return !precision.kept() || precision.dtype != exact;
}

int64_t MixSampleTokens(const OutputSettings& settings) {
  return std::min(settings.mix.tokens, settings.calibration.tokens);
}

int64_t MixStateBytes(const models::DecoderSpec& spec, const OutputSettings& settings,
                      const std::vector<MixPass>& passes) {
  int64_t variants = 0;
  // The first variant is kept for the next pass.
  for (const MixPass& pass : passes) variants = std::max(variants, pass.variants + 1);
  return variants * MixSampleTokens(settings) * spec.hidden * static_cast<int64_t>(sizeof(float));
}

bool HalfAlone(const MixSettings& mix) { return mix.Has(DType::kF16) && !mix.Has(DType::kBF16); }

StatusOr<std::vector<MixPass>> PlanMixPasses(const models::DecoderSpec& spec,
                                             const std::vector<ModelItem>& items,
                                             const OutputSettings& settings, const MixBegun& begun,
                                             int64_t memory) {
  const MixLoad load = LoadOf(spec, items, settings);
  const auto extended = [&](MixPass pass, int layer) {
    pass.end = layer + 1;
    pass.variants += load.layers[layer].variants;
    pass.bytes = load.Bytes(spec, settings, pass);
    return pass;
  };
  std::vector<MixPass> passes;
  MixPass under_way = {.first = begun.first};
  for (int layer = begun.first; layer < begun.end; ++layer) under_way = extended(under_way, layer);
  const bool goes_on = begun.end > begun.first && under_way.bytes <= memory + begun.slack;
  if (goes_on) passes.push_back(under_way);
  const size_t fixed_passes = passes.size();
  MixPass most;  // maximum over the passes for single layers
  for (int layer = goes_on ? begun.end : begun.first; layer < spec.layers; ++layer) {
    const MixPass alone = extended({.first = layer}, layer);
    if (alone.bytes > most.bytes) most = alone;
    // A longer pass may need less memory again: the last one keeps no variant for a later pass.
    const bool joins = passes.size() > fixed_passes;
    const MixPass longer = joins ? extended(passes.back(), layer) : alone;
    if (joins && longer.bytes <= memory) {
      passes.back() = longer;
    } else {
      passes.push_back(alone);
    }
  }
  const auto fits = [&](const MixPass& pass) { return pass.bytes <= memory; };
  if (std::all_of(passes.begin() + static_cast<int64_t>(fixed_passes), passes.end(), fits)) return passes;
  MixPass least = most;
  least.variants = 1;
  const int64_t fixed = load.Bytes(spec, settings, least);
  return ResourceExhausted(
      "measuring the mix in layer {} takes {} bytes, {} of them for its {} variants of {} tokens{}, but {} "
      "are left",
      most.first, most.bytes, most.bytes - fixed, most.variants - 1, MixSampleTokens(settings),
      fixed <= memory ? " (fewer --mix-tokens need less)" : "", std::max<int64_t>(memory, 0));
}

double MixVariantTokens(const models::DecoderSpec& spec, const OutputSettings& settings) {
  // Groups of a layer: q/k/v or q_a/kv_a and q_b, o, and one or two networks. A variant passes through half
  // of the model on average.
  const int attention = spec.attention.kind == models::AttentionSpec::Kind::kMla ? 3 : 2;
  int64_t units = int64_t{spec.layers} * (attention + 1);
  const auto moe_layers = std::ranges::count(spec.is_moe.begin(), spec.is_moe.begin() + spec.layers, true);
  if (spec.moe.shared_intermediate > 0) units += moe_layers;
  const int64_t variants =
      1 + units * VariantsOfUnit(settings.mix) + moe_layers * VariantsOfRouter(settings.mix);
  return static_cast<double>(MixSampleTokens(settings)) * (1 + 0.5 * static_cast<double>(variants));
}

}  // namespace moesaic::quantizer
