// Measures how much GPTQ lowers the loss of rounding to the nearest code, for the options of a mix.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/exec_context.h"
#include "quantizer/calibrate/calibration_stream.h"
#include "quantizer/format/output_plan.h"

namespace moesaic::quantizer {

/// Squared errors of the outputs, summed over linears, by precision group and precision.
struct MixGains {
  struct Sum {
    double gptq = 0, nearest = 0;
  };
  std::map<std::pair<std::string, std::string>, Sum> sums;

  /// Returns the error with GPTQ over that of rounding to the nearest, at most 1; 1 if it was not measured.
  double Of(const std::string& unit, const Precision& precision) const;
};

/// Parameters of a gain walk that do not affect its result.
struct GainWalk {
  std::function<bool(int done)> tell;  // called with the number of layers done; returns false to stop
  int layers = 0;                      // layers measured before, with these gains
  MixGains gains;
  std::function<Status(CalibrationStream& stream)> restore;  // loads hidden states if layers > 0
  /// Called after each layer but the last.
  std::function<Status(int layers, const MixGains& gains, CalibrationStream& stream)> save;
};

/// True if a routed expert is in the sample of its layer.
bool StandsForExperts(int expert, int experts);

/// Runs all tokens of `sequences` through the unrounded model, layer by layer. On the inputs of each linear
/// it measures the error of both ways of rounding, for each option of its group except int8 and unrounded
/// ones. Of the routed experts, a sample is measured.
StatusOr<MixGains> MeasureGains(const kernels::ExecContext& ctx, const checkpoint::Checkpoint& source,
                                const models::DecoderSpec& spec, const std::vector<ModelItem>& items,
                                const OutputSettings& settings, const std::vector<PrecisionGroup>& units,
                                const std::vector<std::vector<int32_t>>& sequences, GainWalk walk);

}  // namespace moesaic::quantizer
