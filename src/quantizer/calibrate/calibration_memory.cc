#include "quantizer/calibrate/calibration_memory.h"

#include <algorithm>
#include <map>

#include "quantizer/calibrate/layer_walk.h"
#include "quantizer/format/runtime_matrix.h"
#include "quantizer/gptq/gptq.h"
#include "quantizer/io/work_plan.h"

namespace moesaic::quantizer {
namespace {

// Memory of GPTQ for the linears of a layer, which share it; each field is a maximum.
struct Gptq {
  int64_t hessian = 0, factor = 0;
  int64_t slab = 0, scratch = 0;  // rounded rows, and scratch of factoring and rounding
};

// Memory of one half of a layer: attention or feed-forward network.
struct Half {
  int64_t packed = 0;  // run-time form of linears outside of routed experts
  int64_t expert = 0;  // one routed expert
  bool routed = false;
  // Memory of the linear whose factor is gathered in order: during and after the factorization, and in
  // run-time form, which does not exist during it.
  int64_t making = 0, made = 0, own = 0;

  // Run-time matrices and GPTQ's buffers.
  int64_t Bytes(const Gptq& gptq) const {
    const int64_t matrices = packed + expert;
    return std::max({matrices + gptq.hessian + gptq.factor, matrices + made, matrices - own + making});
  }
};

struct Layer {
  int64_t frame = 0;  // linears that are not rounded
  Half attention, ffn;
  Gptq gptq;
};

// Rows that are rounded at once.
int RowsAtOnce(const ModelItem& item, const CalibrationLimits& limits) {
  return static_cast<int>(std::min(SlabRows(item, limits.slab_values), item.shape[0]));
}

// Memory of a walk through the model, for GPTQ or for an analysis.
class Walk {
 public:
  Walk(const models::DecoderSpec& spec, const OutputSettings& settings, int threads,
       const CalibrationLimits& limits, bool gptq)
      : spec_(spec),
        settings_(settings),
        threads_(threads),
        limits_(limits),
        gptq_(gptq),
        roundings_(settings.Roundings()) {}

  void Add(const ModelItem& item) {
    Layer& layer = layers_[item.layer];
    if (!item.roundable) {  // routers in f32; kv_b_proj in bf16, half of it transposed as well
      layer.frame += item.elements() * 4;
      return;
    }
    Half& half = item.name.find(".self_attn.") != std::string::npos ? layer.attention : layer.ffn;
    const int64_t packed = Packed(item);
    if (item.routed) {
      half.expert = std::max(half.expert, 3 * packed);
      half.routed = true;
    } else {
      half.packed += packed;
    }
    if (!gptq_) return;
    AddGptq(item, &layer.gptq);
    const int64_t k = item.shape[1];
    if (!limits_.GathersInOrder(k, item.routed)) return;
    const auto inputs = static_cast<int>(k);
    const int64_t making = FactorBytes(inputs) + Factorizer::FromInputsBytes(inputs);
    if (making <= half.making) return;
    half.making = making;
    half.made = FactorBytesMade(inputs);
    half.own = packed;
  }

  int64_t Bytes() const {
    const CalibrationId& id = settings_.calibration;
    const WalkScratch scratch = WalkScratchOf(spec_, id.tokens, id.longest, limits_.part_rows);
    int64_t most = 0;
    for (const auto& [index, layer] : layers_) {
      int64_t held = layer.frame + layer.gptq.slab;
      if (layer.ffn.routed && gptq_) {  // Hessians of shared inputs and of stand-ins
        held += Hessian::Bytes(spec_.hidden) + Hessian::Bytes(spec_.moe.intermediate);
      }
      const int64_t of_gptq = layer.gptq.scratch;  // overlaps (LayerVisitor::ScratchBytes)
      most = std::max(most, held + layer.attention.Bytes(layer.gptq) + std::max(scratch.attention, of_gptq));
      int64_t ffn = held + layer.ffn.Bytes(layer.gptq) + std::max(scratch.ffn, of_gptq);
      if (layer.ffn.routed) ffn += RoutingBytes(spec_, id.tokens);
      most = std::max(most, ffn);
    }
    // Reading a state takes no more memory than a layer's work.
    return most + CalibrationStream::Bytes(spec_, id.tokens, id.longest);
  }

 private:
  int64_t Packed(const ModelItem& item) const {
    const bool mix = settings_.mix.wanted();
    const auto is_f32 = [](const KeepRule& rule) { return rule.dtype == tensor::DType::kF32; };
    // An analysis has all linears in bf16, and --keep may.
    if (!gptq_ || mix || !settings_.keep.empty()) {
      const bool f32 =
          mix ? settings_.mix.Has(tensor::DType::kF32) : gptq_ && std::ranges::any_of(settings_.keep, is_f32);
      return item.elements() * (f32 ? 4 : 2);
    }
    int64_t packed = 0;
    for (const Precision& precision : roundings_) {
      packed = std::max(packed, RuntimeMatrix::Bytes(precision.grid(), static_cast<int>(item.shape[0]),
                                                     static_cast<int>(item.shape[1])));
    }
    return packed;
  }

  void AddGptq(const ModelItem& item, Gptq* gptq) const {
    const auto k = static_cast<int>(item.shape[1]);
    if (!limits_.GathersInOrder(k, item.routed)) {
      gptq->hessian = std::max(gptq->hessian, Hessian::Bytes(k));
      gptq->factor = std::max(gptq->factor, FactorBytes(k));
    }
    gptq->scratch = std::max(gptq->scratch, GptqScratchBytes(item, roundings_, threads_, limits_));
    gptq->slab = std::max(gptq->slab, int64_t{RowsAtOnce(item, limits_)} * k * 6);
    // Measuring a mix reads a whole linear.
    if (settings_.mix.wanted()) gptq->slab = std::max(gptq->slab, item.elements() * 4);
  }

  const models::DecoderSpec& spec_;
  const OutputSettings& settings_;
  const int threads_;
  const CalibrationLimits& limits_;
  const bool gptq_;
  const std::vector<Precision> roundings_;
  std::map<int, Layer> layers_;
};

}  // namespace

bool IsWalked(const ModelItem& item, const models::DecoderSpec& spec) {
  return item.linear && item.layer >= 0 && item.shape[0] != spec.vocab;
}

int64_t GptqScratchBytes(const ModelItem& item, std::span<const Precision> roundings, int threads,
                         const CalibrationLimits& limits) {
  const auto k = static_cast<int>(item.shape[1]);
  int64_t most = FactoringScratchBytes(k, threads);
  for (const Precision& precision : roundings) {
    most = std::max(most, GptqBytes(precision.grid(), RowsAtOnce(item, limits), k, threads));
  }
  return most;
}

int64_t GptqScratchBytes(const models::DecoderSpec& spec, std::span<const ModelItem> items, int layer,
                         std::span<const Precision> roundings, int threads, const CalibrationLimits& limits) {
  int64_t most = 0;
  for (const ModelItem& item : items) {
    if (item.layer != layer || !item.roundable || !IsWalked(item, spec)) continue;
    most = std::max(most, GptqScratchBytes(item, roundings, threads, limits));
  }
  return most;
}

int64_t StateBytes(const models::DecoderSpec& spec, const OutputSettings& settings) {
  return settings.calibration.tokens * spec.hidden * static_cast<int64_t>(sizeof(float));
}

int64_t CalibrationBytes(const models::DecoderSpec& spec, const std::vector<ModelItem>& items,
                         const OutputSettings& settings, int threads, const CalibrationLimits& limits) {
  int64_t most = 0;
  const auto walk = [&](bool gptq) {
    Walk account(spec, settings, threads, limits, gptq);
    for (const ModelItem& item : items) {
      if (IsWalked(item, spec)) account.Add(item);
    }
    return account.Bytes();
  };
  if (settings.gptq) most = walk(/*gptq=*/true);
  if (settings.analyze.wanted()) most = std::max(most, walk(/*gptq=*/false) + AnalysisBytes(spec));
  return most + settings.calibration.tokens * 8;  // token ids
}

std::vector<CalibrationLimits> LimitsFor(const models::DecoderSpec& spec, const OutputSettings& settings) {
  if (settings.mix.wanted()) return {CalibrationLimits()};  // its walks need the full limits
  const models::AttentionSpec& a = spec.attention;
  const int wide = std::max(spec.hidden, a.heads * std::max(a.v_dim, a.head_dim)) + 1;
  std::vector<CalibrationLimits> limits;
  for (const int in_order : {CalibrationLimits().in_order_inputs, wide}) {
    for (const auto& [rows, slab_bits] : {std::pair(2048, 24), {1024, 23}, {512, 23}, {512, 22}}) {
      limits.push_back(
          {.part_rows = rows, .slab_values = int64_t{1} << slab_bits, .in_order_inputs = in_order});
    }
  }
  return limits;
}

}  // namespace moesaic::quantizer
