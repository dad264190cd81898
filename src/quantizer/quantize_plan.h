// What a run of `moesaic quantize` is asked for, and everything about it that is decided before the first
// weight is read.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/device.h"
#include "models/decoder_spec.h"
#include "quantizer/calibrate/calibration_memory.h"
#include "quantizer/format/output_plan.h"
#include "quantizer/io/work_plan.h"
#include "quantizer/mixed/mix_passes.h"
#include "runtime/async_file.h"

namespace moesaic::quantizer {

struct QuantizeProgress {
  int64_t done = 0, total = 0;  // output bytes
  bool checking = false;        // reads what an earlier run wrote
  std::string stage = {};       // of a calibrated run: "layer 3 of 27, expert 12 of 64"
};

struct QuantizeOptions {
  OutputSettings output;
  /// Token ids of calibration, for methods that need some: output.calibration tells of these.
  std::vector<std::vector<int32_t>> calibration;
  /// The share of a layer's experts that must see kCoveredTokens (calibrated_run.h) of them.
  double min_coverage = 0.9;
  int64_t memory = int64_t{8} << 30;  // what may be resident at most
  int threads = 0;                    // of the pool that works; 0: as many as the machine runs at once
  MixBegun begun;                     // of a mix: what is measured already
  UnitSizes sizes;                    // unit_bytes 0: what the memory allows
  kernels::Device* device = nullptr;  // where GPTQ's heavy stage runs; null: on the processor
  /// What was resident at most before the run began, opening the device included: the kernel counts it as
  /// the run's. Quantize measures it.
  int64_t resident_before = 0;
  /// Of a run on a device that goes on: as many weights are rounded at once as it was begun with, whatever
  /// the memory. 0: as many as the memory allows.
  int64_t slab_values = 0;
  std::optional<CalibrationLimits> limits;  // none: those that the memory allows
  bool direct = false;                      // past the page cache, with O_DIRECT
  runtime::AsyncFiles::Backend backend = runtime::AsyncFiles::Backend::kBest;
  /// Seconds of work after which a calibrated run saves what it would have to do again.
  double save_seconds = 30;
  /// Further files of the folder: name and content.
  std::vector<std::pair<std::string, std::string>> texts;
  /// Called after each unit, and by a calibrated run more often; return false to stop.
  std::function<bool(const QuantizeProgress&)> progress;
};

struct QuantizePlan {
  models::DecoderSpec spec;
  std::vector<ModelItem> items;
  std::vector<SourceForm> forms;
  std::vector<MixUnit> units;  // of a mix, with nominal losses
  MixFixed fixed;              // likewise
  OutputPlan output;           // of a mix that is not chosen yet: as NominalError would choose
  WorkPlan work;
  UnitSizes sizes;  // CutWork's; alone_bytes 0 where no unit is alone
  int64_t source_bytes = 0;
  CalibrationLimits limits;
  int64_t calibration_bytes = 0;  // memory that calibration takes at most, beside units
  std::vector<MixPass> passes;    // that measure a mix, before there are units; none when it is chosen
};

/// Plans a run. A memory that is too small is refused with how much is needed.
StatusOr<QuantizePlan> PlanQuantize(const checkpoint::Checkpoint& source, const QuantizeOptions& options);

}  // namespace moesaic::quantizer
