#include "quantizer/mixed/mix_gain.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "base/round.h"
#include "kernels/exec_context.h"
#include "quantizer/calibrate/calibration_memory.h"
#include "quantizer/calibrate/layer_walk.h"
#include "quantizer/format/runtime_matrix.h"
#include "quantizer/format/weight_rows.h"
#include "quantizer/gptq/factor.h"

namespace moesaic::quantizer {
namespace {

using checkpoint::Checkpoint;

// Sampled experts of a layer.
constexpr int kSampleExperts = 8;

class GainMeasurer : public LayerVisitor {
 public:
  GainMeasurer(const kernels::ExecContext& ctx, const Checkpoint& source, const models::DecoderSpec& spec,
               const OutputSettings& settings, const std::vector<ModelItem>& items,
               const std::vector<PrecisionGroup>& units, MixGains gains, CalibrationStream& stream)
      : ctx_(ctx),
        source_(source),
        spec_(spec),
        settings_(settings),
        items_(items),
        gains_(std::move(gains)),
        stream_(stream) {
    for (const PrecisionGroup& unit : units) units_[unit.name] = &unit;
    for (const ModelItem& item : items) {
      if (item.linear) rows_of_[item.name] = static_cast<int>(item.shape[0]);
    }
  }

  const MixGains& gains() const { return gains_; }
  MixGains Take() { return std::move(gains_); }

 private:
  // Memory of factoring, and of rounding the rows of MeasureLoss.
  int64_t ScratchBytes(int layer) const override {
    return GptqScratchBytes(spec_, items_, layer, settings_.Roundings(), ctx_.pool->size(),
                            {.slab_values = 0});
  }

  StatusOr<std::vector<OwnedMatrix>> Visit(const LinearGroup& group) override {
    std::vector<OwnedMatrix> matrices;
    for (const std::string& module : group.modules) {
      ASSIGN_OR_RETURN(RuntimeMatrix kept,
                       RuntimeMatrix::OfKept(tensor::DType::kBF16, rows_of_.at(module), group.inputs.k));
      RETURN_IF_ERROR(kept.ReadKept(*ctx_.pool, source_, module));
      matrices.push_back(kept.Take());
    }
    source_.ForgetMaps();
    RETURN_IF_ERROR(Measure(group));  // the weights were read, so they are finite
    return matrices;
  }

  Status OnRouting(int, std::span<const int64_t>) override { return OkStatus(); }

  bool IsSampled(const LinearGroup& group) const {
    return group.expert < 0 || StandsForExperts(group.expert, spec_.moe.experts);
  }

  Status Measure(const LinearGroup& group) {
    if (!IsSampled(group)) return OkStatus();
    const HessianFactor* factor = nullptr;
    for (const std::string& module : group.modules) {
      const auto found = units_.find(PrecisionGroupOf(module));
      if (found == units_.end()) continue;
      if (factor == nullptr) {
        ASSIGN_OR_RETURN(factor, Factor(group));
        if (factor == nullptr) return OkStatus();
      }
      const int n = rows_of_.at(module), k = group.inputs.k;
      ASSIGN_OR_RETURN(const std::vector<float> rows, ReadRows(ctx_, source_, module, n, k, 0, n));
      for (const MixOption& option : found->second->options) {
        if (option.precision.kept() || IsInt8(*option.precision.scheme)) continue;
        MixGains::Sum& sum = gains_.sums[{found->first, option.precision.Name()}];
        const ScaleSearch search{.by_error = true, .importance = {}};
        for (const bool gptq : {false, true}) {
          ASSIGN_OR_RETURN(const double loss, MeasureLoss(ctx_, option.precision.grid(), rows.data(), n, k,
                                                          *factor, search, gptq));
          (gptq ? sum.gptq : sum.nearest) += loss;
        }
      }
    }
    return OkStatus();
  }

  // Returns the factor of a group. An expert with fewer tokens than inputs uses its layer's Hessian, and
  // groups that read the layer's inputs share one factor. Null if all inputs are 0. Valid until the next
  // call.
  StatusOr<const HessianFactor*> Factor(const LinearGroup& group) {
    const int k = group.inputs.k;
    const bool leans = group.expert >= 0 && group.inputs.tokens < k;
    const bool shared = group.same_layer_inputs && (leans || group.expert < 0);
    std::optional<HessianFactor>& kept = shared ? layer_factor_ : own_factor_;
    if (shared && layer_ == group.layer) return kept ? &*kept : nullptr;
    if (shared) layer_ = group.layer;
    kept.reset();
    ASSIGN_OR_RETURN(Hessian hessian, Hessian::Create(k));
    (leans ? group.layer_inputs : group.inputs).visit([&](const TokenRows& tokens) {
      hessian.Add(ctx_, tokens);
    });
    RETURN_IF_ERROR(stream_.watched());  // fails if inputs are missing
    if (!hessian.any()) return nullptr;
    StatusOr<HessianFactor> factor =
        FactorHessian(ctx_, hessian, {.watch = [this] { return stream_.CheckWatch(); }});
    if (!factor.ok()) return Annotate(factor.status(), group.modules.front());
    kept = *std::move(factor);
    return &*kept;
  }

  const kernels::ExecContext& ctx_;
  const Checkpoint& source_;
  const models::DecoderSpec& spec_;
  const OutputSettings& settings_;
  std::map<std::string, const PrecisionGroup*> units_;
  std::map<std::string, int> rows_of_;
  const std::vector<ModelItem>& items_;
  MixGains gains_;
  CalibrationStream& stream_;
  // Factor of layer_; factor of the last measured group.
  std::optional<HessianFactor> layer_factor_, own_factor_;
  int layer_ = -1;
};

}  // namespace

double MixGains::Of(const std::string& unit, const Precision& precision) const {
  const auto found = sums.find({unit, precision.Name()});
  if (found == sums.end() || !(found->second.nearest > 0) || std::isinf(found->second.nearest)) return 1;
  return std::min(1.0, found->second.gptq / found->second.nearest);  // 1 if the ratio is NaN
}

bool StandsForExperts(int expert, int experts) {
  return expert % base::CeilDiv(experts, kSampleExperts) == 0;
}

StatusOr<MixGains> MeasureGains(const kernels::ExecContext& ctx, const Checkpoint& source,
                                const models::DecoderSpec& spec, const std::vector<ModelItem>& items,
                                const OutputSettings& settings, const std::vector<PrecisionGroup>& units,
                                const std::vector<std::vector<int32_t>>& sequences, GainWalk walk) {
  ASSIGN_OR_RETURN(CalibrationStream stream, CalibrationStream::Create(source, spec, sequences, ctx));
  if (walk.layers > 0) RETURN_IF_ERROR(walk.restore(stream));
  int layer = walk.layers;
  const auto watch = [&]() -> Status { return walk.tell(layer) ? OkStatus() : Stopped(); };
  stream.set_watch(watch);
  GainMeasurer measurer(ctx, source, spec, settings, items, units, std::move(walk.gains), stream);
  for (; layer < spec.layers; ++layer) {
    RETURN_IF_ERROR(watch());
    RETURN_IF_ERROR(WalkLayer(ctx, source, spec, layer, nullptr, stream, measurer));
    if (layer + 1 < spec.layers) RETURN_IF_ERROR(walk.save(layer + 1, measurer.gains(), stream));
  }
  return measurer.Take();
}

}  // namespace moesaic::quantizer
