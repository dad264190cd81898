// What GPTQ leaves of the loss of rounding to the nearest, for the options of a mix.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "quantizer/calibrate/calibration_stream.h"
#include "quantizer/format/output_plan.h"

namespace moesaic::quantizer {

/// The outputs' squared errors, summed up over linears, by unit and precision.
struct MixGains {
  struct Sum {
    double gptq = 0, nearest = 0;
  };
  std::map<std::pair<std::string, std::string>, Sum> sums;

  /// The share of the error that is left; 1 where nothing was measured.
  double Of(const std::string& unit, const Precision& precision) const;
};

/// How gains are measured; none of it changes what comes out.
struct GainWalk {
  std::function<bool(int done)> tell;  // called with layers done and at times between; returns false to stop
  int layers = 0;                      // done before, to which these are
  MixGains gains;
  std::function<Status(CalibrationStream& stream)> restore;  // of hidden states, where layers > 0
  /// Called behind each layer but the last.
  std::function<Status(int layers, const MixGains& gains, CalibrationStream& stream)> save;
};

/// Whether a routed expert is among those of its layer that stand for all.
bool StandsForExperts(int expert, int experts);

/// Walks all tokens of `sequences` through the unrounded model and measures, by MeasureLoss, linears of each
/// unit: of routed experts some.
StatusOr<MixGains> MeasureGains(const kernels::ExecContext& ctx, const checkpoint::Checkpoint& source,
                                const models::DecoderSpec& spec, const std::vector<ModelItem>& items,
                                const OutputSettings& settings, const std::vector<MixUnit>& units,
                                const std::vector<std::vector<int32_t>>& sequences, GainWalk walk);

}  // namespace moesaic::quantizer
