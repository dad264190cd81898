// What GPTQ leaves of the loss of rounding to the nearest, for the options of a mix.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "quantizer/output_plan.h"

namespace moesaic::quantizer {

/// The share of the outputs' squared error that is left, by unit and precision.
struct MixGains {
  std::map<std::pair<std::string, std::string>, double> shares;

  /// 1 where nothing was measured.
  double Of(const std::string& unit, const Precision& precision) const;
};

/// Walks all tokens of `sequences` through the unrounded model and measures, by MeasureLoss, linears of each
/// unit: of routed experts some. `tell` is called with layers done and returns false to stop.
StatusOr<MixGains> MeasureGains(const kernels::ExecContext& ctx, const checkpoint::Checkpoint& source,
                                const models::DecoderSpec& spec, const std::vector<ModelItem>& items,
                                const OutputSettings& settings, const std::vector<MixUnit>& units,
                                const std::vector<std::vector<int32_t>>& sequences,
                                const std::function<bool(int done)>& tell);

}  // namespace moesaic::quantizer
