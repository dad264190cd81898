// Forecasts the duration of a run from its plan, which needs no weights, and the measured rates of the
// machine.
#pragma once

#include "quantizer/io/machine_rates.h"
#include "quantizer/quantize.h"

namespace moesaic::quantizer {

struct Forecast {
  double disk_seconds = 0;     // reading and writing
  double compute_seconds = 0;  // rounding and copying
  double seconds = 0;          // total, with overlap
  bool disk_bound = false;
  int64_t reread_bytes = 0;  // source bytes that are read twice for NVFP4's shared scales
};
Forecast ForecastOf(const QuantizePlan& plan, const MachineRates& rates, bool direct, int threads);

}  // namespace moesaic::quantizer
