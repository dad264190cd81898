// Options of `moesaic quantize`, and the plan of a run, which is fixed before the first weight is read.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/gptq_accelerator.h"
#include "models/decoder_spec.h"
#include "quantizer/calibrate/calibration_memory.h"
#include "quantizer/format/output_plan.h"
#include "quantizer/io/state_store.h"
#include "quantizer/io/work_plan.h"
#include "quantizer/mixed/mix_passes.h"
#include "runtime/async_file.h"

namespace moesaic::quantizer {

struct QuantizeProgress {
  int64_t done = 0, total = 0;  // output bytes
  bool checking = false;        // true while the output of an earlier run is checked
  std::string stage = {};       // stage of a calibrated run: "layer 3 of 27, expert 12 of 64"
};

struct QuantizeOptions {
  OutputSettings output;
  /// Token ids for calibration; output.calibration identifies them.
  std::vector<std::vector<int32_t>> calibration;
  int64_t memory = int64_t{8} << 30;           // maximum resident memory
  int threads = 0;                             // number of pool threads; 0: all hardware threads
  MixBegun begun;                              // progress of an earlier measurement of the mix
  UnitSizes sizes;                             // unit_bytes 0: derived from the memory
  kernels::GptqAccelerator* device = nullptr;  // runs GPTQ's heavy stage; null: the CPU
  /// Peak resident memory before the run, including the opening of the device. The kernel counts it as the
  /// run's. Quantize measures it.
  int64_t resident_before = 0;
  /// For a resumed run on a device: number of weights that are rounded at once, as at its start. 0: derived
  /// from the memory.
  int64_t slab_values = 0;
  std::optional<CalibrationLimits> limits;  // none: derived from the memory
  bool direct = false;                      // uses O_DIRECT, past the page cache
  runtime::AsyncFiles::Backend backend = runtime::AsyncFiles::Backend::kBest;
  /// Maximum share of the time that saving the states of walks may take; 1: after every layer.
  double save_share = kSaveShare;
  /// Additional files of the folder: name and content.
  std::vector<std::pair<std::string, std::string>> texts;
  /// Called after each unit, and more often by a calibrated run; returns false to stop.
  std::function<bool(const QuantizeProgress&)> progress;
};

struct QuantizePlan {
  models::DecoderSpec spec;
  std::vector<ModelItem> items;
  std::vector<SourceForm> forms;
  std::vector<PrecisionGroup> units;  // precision groups of a mix, with nominal losses
  MixFixed fixed;                     // costs outside of the mix
  OutputPlan output;                  // of a mix without a choice: planned with the choice by NominalError
  WorkPlan work;
  UnitSizes sizes;  // sizes for CutWork; alone_bytes 0: no exclusive units
  int64_t source_bytes = 0;
  CalibrationLimits limits;
  int64_t calibration_bytes = 0;  // maximum memory of calibration, in addition to units
  std::vector<MixPass> passes;    // passes that measure a mix, before the units; none after the choice
};

/// Plans a run. Fails if there is too little memory, and states the needed size.
StatusOr<QuantizePlan> PlanQuantize(const checkpoint::Checkpoint& source, const QuantizeOptions& options);

}  // namespace moesaic::quantizer
