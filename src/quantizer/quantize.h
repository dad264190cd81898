// `moesaic quantize`: writes a checkpoint's linears on another grid, in bounded memory, and goes on where a
// run before it was killed.
#pragma once

#include "kernels/kernel_table.h"
#include "quantizer/calibrate/calibrated_run.h"
#include "quantizer/io/unit_stream.h"
#include "quantizer/quantize_plan.h"

namespace moesaic::quantizer {

/// The file of the folder that holds QuantizeReport::Json().
inline constexpr char kReportFile[] = "quantize.json";

struct QuantizeReport {
  int64_t source_bytes = 0;  // of the checkpoint's tensors
  int64_t output_bytes = 0;  // of the files written, whole
  StreamCounts stream;
  size_t units = 0;
  size_t rounded = 0, copied = 0, converted = 0;  // linears, and other tensors
  CalibrationReport calibration;                  // of GPTQ
  std::shared_ptr<const Analysis> analysis;       // or null
  double analysis_seconds = 0;                    // of this run
  bool analysis_resumed = false;  // a run before this one had made the analysis, or a part of it
  double seconds = 0;
  int64_t peak_bytes = 0;  // resident
  std::string io;          // AsyncFiles::backend()
  std::string device;      // DeviceInfo::identity of where GPTQ's heavy stage ran; empty: on the processor

  double compute_seconds() const;  // without waiting
  nlohmann::ordered_json Json(const OutputSettings& settings) const;
};

/// Quantizes `source` into `folder`, which must be empty, new, or hold the journal of a run with the same
/// settings and source. After any failure the same call goes on from the last unit in the journal, a
/// calibrated one from the last state; the weights that come out are the same to the byte.
StatusOr<QuantizeReport> Quantize(const checkpoint::Checkpoint& source, const QuantizeOptions& options,
                                  const kernels::KernelTable& kernels, runtime::ThreadPool& pool,
                                  const std::string& folder);

}  // namespace moesaic::quantizer
