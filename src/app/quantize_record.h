// Reads quantize.json, the record of a quantization: its work, times, and the quality of each calibrated
// linear.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "quantizer/mixed/mix.h"

namespace moesaic::app {

struct QuantizeRecord {
  struct Linear {
    std::string name, kind, method;
    int layer = -1;
    // Fields that the run did not record are empty.
    std::optional<double> tokens, shrinkage, loss, of_nearest, damping;
  };
  std::string settings;                                // settings as JSON text
  std::string device;                                  // device of GPTQ's heavy stage; empty: the CPU
  std::optional<double> tokens, sequences;             // of the calibration
  std::vector<std::pair<std::string, double>> stages;  // name, seconds
  std::vector<Linear> linears;
  std::optional<quantizer::Mix> mix;
  std::optional<double> peak_bytes, seconds, source_bytes, output_bytes, read_bytes, written_bytes;
  bool analyzed = false;  // an analysis was made; its reads are not in read_bytes
  /// Bytes moved and times belong to the process that finished the run. It did `units` minus `resumed_units`.
  std::optional<double> units, resumed_units;
  bool resumed_analysis = false;  // an earlier process made the analysis or a part of it
  bool resumed() const { return resumed_units.value_or(0) > 0 || resumed_analysis; }
  /// True if the times cover all the work and the CPU did it. Otherwise a CPU's rates cannot be compared.
  bool has_roofline() const { return !resumed() && device.empty(); }
};

/// `file` is named in errors. Fields may be missing; fields of an unexpected type are errors.
StatusOr<QuantizeRecord> ParseQuantizeRecord(const std::string& text, const std::string& file);

}  // namespace moesaic::app
