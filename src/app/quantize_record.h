// quantize.json, which a run leaves beside what it wrote: what it did, how long it took, and, where it was
// calibrated, how well each linear came out.
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
    // What the run did not tell stays empty.
    std::optional<double> tokens, effective_tokens, shrinkage, loss, of_nearest, damping;
  };
  std::string settings;                     // JSON text
  std::string device;                       // where GPTQ's heavy stage ran; empty: on the processor
  std::optional<double> tokens, sequences;  // of the calibration
  std::vector<std::pair<std::string, double>> stages;  // name, seconds
  std::vector<Linear> linears;
  std::optional<quantizer::Mix> mix;
  std::optional<double> peak_bytes, seconds, source_bytes, output_bytes, read_bytes, written_bytes;
  bool analyzed = false;  // an analysis came before; what it read of the source is not in read_bytes
  /// Bytes moved and times are of the process that ended the run: of `units` less those that were done
  /// before.
  std::optional<double> units, resumed_units;
  bool resumed_analysis = false;  // all of the analysis, or a part of it, was made before as well
  bool resumed() const { return resumed_units.value_or(0) > 0 || resumed_analysis; }
  /// Whether times are those of all the work, and of this program's own: else a processor's rates say nothing
  /// of them.
  bool has_roofline() const { return !resumed() && device.empty(); }
};

/// `file` is named in errors. Fields may be missing; those of another type than expected are refused.
StatusOr<QuantizeRecord> ParseQuantizeRecord(const std::string& text, const std::string& file);

}  // namespace moesaic::app
