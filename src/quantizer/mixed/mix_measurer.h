// Measures what options of a mix lose, in one pass (mix_walk.h).
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "quantizer/calibrate/layer_walk.h"
#include "quantizer/mixed/mix_passes.h"

namespace moesaic::quantizer {

/// Visits the layers of a pass: what runs on the lanes of its units and routers.
class MixMeasurer : public LayerVisitor {
 public:
  /// Of `units`, those of the layers [pass.first, pass.end), whose linears are among `items`. The other
  /// arguments must outlive it.
  static std::unique_ptr<MixMeasurer> Create(const kernels::ExecContext& ctx,
                                             const checkpoint::Checkpoint& source,
                                             const models::DecoderSpec& spec, const OutputSettings& settings,
                                             const std::vector<ModelItem>& items, const MixPass& pass,
                                             std::vector<MixUnit> units, CalibrationStream& stream);

  /// Behind the last layer: the units with their losses, and routers.
  virtual StatusOr<Mix> Finish() = 0;

  /// Between two layers: what it knows so far, and takes up again. That adds the stream's lanes, whose hidden
  /// states are the caller's.
  virtual nlohmann::ordered_json Json() const = 0;
  virtual Status Restore(const nlohmann::ordered_json& json) = 0;
};

}  // namespace moesaic::quantizer
