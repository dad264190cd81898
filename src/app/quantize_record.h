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

/// Contents of quantize.json. An optional field is empty if the run did not record it.
struct QuantizeRecord {
  /// Statistics of one calibrated linear. quantizer::LinearFinding explains the fields.
  struct Linear {
    std::string name, kind, method;
    int layer = -1;
    std::optional<double> tokens, shrinkage, loss, of_nearest, damping;
  };
  std::string settings;                                // JSON text
  std::string device;                                  // accelerator that ran GPTQ; empty: the CPU
  std::optional<double> tokens, sequences;             // numbers of calibration tokens and sequences
  std::vector<std::pair<std::string, double>> stages;  // name and seconds of each stage
  std::vector<Linear> linears;
  std::optional<quantizer::Mix> mix;
  std::optional<double> peak_bytes, seconds, source_bytes, output_bytes, read_bytes, written_bytes;
  bool analyzed = false;  // an analysis was made; its reads are not in read_bytes
  /// Units of the run, and those that earlier processes had finished. Times, read_bytes and written_bytes are
  /// those of the last process, which did the difference.
  std::optional<double> units, resumed_units;
  bool resumed_analysis = false;  // an earlier process made the analysis or a part of it
  bool resumed() const { return resumed_units.value_or(0) > 0 || resumed_analysis; }
  /// True if the times cover all the work and the CPU did it, so that they can be compared with a Roofline.
  bool has_roofline() const { return !resumed() && device.empty(); }
};

/// Parses quantize.json. Fields may be missing. DataLoss names `file` and the first field of a wrong type.
StatusOr<QuantizeRecord> ParseQuantizeRecord(const std::string& text, const std::string& file);

}  // namespace moesaic::app
