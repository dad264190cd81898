// Measures the losses of a mix's options in one pass (mix_walk.h).
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "kernels/exec_context.h"
#include "quantizer/calibrate/layer_walk.h"
#include "quantizer/mixed/mix_passes.h"

namespace moesaic::quantizer {

/// Visits the layers of a pass and supplies the matrices of the variants of its groups and routers.
class MixMeasurer : public LayerVisitor {
 public:
  /// Measures those of `units` in layers [pass.first, pass.end); their linears are among `items`. The other
  /// arguments must outlive the object.
  static std::unique_ptr<MixMeasurer> Create(const kernels::ExecContext& ctx,
                                             const checkpoint::Checkpoint& source,
                                             const models::DecoderSpec& spec, const OutputSettings& settings,
                                             const std::vector<ModelItem>& items, const MixPass& pass,
                                             std::vector<PrecisionGroup> units, CalibrationStream& stream);

  /// Returns the groups with their losses, and routers. Called after the last layer.
  virtual StatusOr<Mix> Finish() = 0;

  /// Saves and restores the progress between two layers. Restore adds the stream's variants; the caller loads
  /// their hidden states.
  virtual nlohmann::ordered_json Json() const = 0;
  virtual Status Restore(const nlohmann::ordered_json& json) = 0;
};

}  // namespace moesaic::quantizer
